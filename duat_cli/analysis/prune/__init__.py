"""`duat prune-bound`."""

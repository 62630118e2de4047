"""The report of `duat prune-bound`."""

"""The page of `duat prune-bound`."""

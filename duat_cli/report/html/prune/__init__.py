"""The page of `duat prune-bound`, one file a picture."""

"""The page of `duat compare`."""

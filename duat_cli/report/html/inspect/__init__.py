"""The page of `duat inspect`."""

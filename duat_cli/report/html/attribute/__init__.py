"""The page of `duat attribute`."""

"""The page of `duat plan`."""

"""The page of `duat inspect`, one file a picture."""

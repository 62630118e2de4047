"""The page of `duat attribute`, one file a picture."""

"""The page of `duat check`, one file a picture."""

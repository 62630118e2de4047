"""The page of `duat lora-diff`, one file a picture."""

"""`duat lora-diff`."""

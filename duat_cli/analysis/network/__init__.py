"""`duat matrix --network`."""

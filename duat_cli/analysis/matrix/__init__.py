"""`duat matrix`."""

"""`duat check`."""

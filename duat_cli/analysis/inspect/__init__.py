"""`duat inspect` and `duat verify`."""

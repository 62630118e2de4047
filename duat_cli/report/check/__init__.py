"""`duat check` in the forms that other programs read."""

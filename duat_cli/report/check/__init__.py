"""The forms of `duat check`: text for a terminal, and formats that other programs read."""

"""The fixture that runs the command line."""

from running import duat

__all__ = ["duat"]

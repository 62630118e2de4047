"""The fixtures that run the command line with nothing faked."""

from running_checks import demo, duat

__all__ = ["demo", "duat"]

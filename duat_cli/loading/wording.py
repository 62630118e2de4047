"""Foreign names inside a message: quoted, cut, listed."""

from __future__ import annotations

from duat_cli.text import clean

_NAMES_SHOWN = 4


def shown(name: object, limit: int = 120) -> str:
    """A foreign name in quotes, fit for a terminal, cut when absurdly long."""
    text = clean(str(name))
    return f"'{text}'" if len(text) <= limit else f"'{text[:limit]}...'"


def listed(names: list[str]) -> str:
    """The first few names, sorted, and how many more there are."""
    first = ", ".join(shown(n) for n in sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{first} and {more} more" if more > 0 else first

"""The known key that a wrong one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from duat_cli.loading.wording import shown

_FOREIGN = 200  # characters; nothing known is as long, and comparing is quadratic


def nearest(key: str, known: Iterable[str]) -> str:
    """The most similar of the known keys; '' where none is known."""
    return max(known, key=lambda k: SequenceMatcher(None, key[:_FOREIGN].lower(), k.lower()).ratio(), default="")


def suggestion(key: str, known: Iterable[str]) -> str:
    found = nearest(key, known)
    return f"; the nearest known is {shown(found)}" if found else ""

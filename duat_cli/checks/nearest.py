"""The known key that is most similar to a wrong one."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher

from duat_cli.text import shown

_FOREIGN = 200  # characters; nothing known is as long, and comparing is quadratic
_SIMILAR = 0.6  # difflib's own cutoff; below it two words have little in common
_FEW = 8  # up to so many known keys are all named


def nearest(key: str, known: Collection[str]) -> str:
    """The most similar of the known keys; '' where none is similar."""

    def similarity(other: str) -> float:
        return SequenceMatcher(None, key[:_FOREIGN].lower(), other.lower()).ratio()

    found = max(known, key=similarity, default="")
    return found if similarity(found) >= _SIMILAR else ""


def suggestion(key: str, known: Collection[str]) -> str:
    """The end of an error text about an unknown key: the nearest known key, or all of them if they are few."""
    if found := nearest(key, known):
        return f"; the nearest known is {shown(found)}"
    return f"; expected one of {', '.join(known)}" if 0 < len(known) <= _FEW else ""

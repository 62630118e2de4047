"""How an analysis says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # (done, total, what is being done)


def expect(progress: Progress, seconds: float) -> None:
    """Say how long all of it will take, to a progress that wants to know."""
    hear = getattr(progress, "expect", None)
    if hear is not None:
        hear(seconds)

"""How an analysis says how far it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # (done, total, what is being done)


def expect(progress: Progress, seconds: float) -> None:
    """Say how long all of it will take, to a progress that wants to know."""
    hear = getattr(progress, "expect", None)
    if hear is not None:
        hear(seconds)


def ticker(progress: Progress, depth: int, prompts: int) -> Callable[[int], None]:
    """Called with a prompt's number behind each of the `depth` blocks that it goes through."""
    done = itertools.count(1)
    return lambda number: progress(next(done), prompts * depth, f"prompt {number + 1} of {prompts}")


def within(progress: Progress, depth: int, before: int, prompts: int) -> Progress:
    """Of some of so many prompts, of which others are through, as that of all."""

    def some(done: int, _of: int, _what: str) -> None:
        progress(before * depth + done, prompts * depth, f"prompt {before + -(-done // depth)} of {prompts}")

    return some

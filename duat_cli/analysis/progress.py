"""Reports of an analysis on its progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # (done, total, what is being done)


def expect(progress: Progress, seconds: float) -> None:
    """Passes on how long a run will take, in seconds, if `progress` can show it."""
    hear = getattr(progress, "expect", None)
    if hear is not None:
        hear(seconds)


def ticker(progress: Progress, depth: int, prompts: int) -> Callable[[int], None]:
    """A function to be called with a prompt's number behind each of the `depth` blocks that it goes through."""
    done = itertools.count(1)
    return lambda number: progress(next(done), prompts * depth, f"prompt {number + 1} of {prompts}")


def within(progress: Progress, depth: int, before: int, prompts: int) -> Progress:
    """Progress of some of `prompts` prompts, shown as progress of all. before: prompts that are done already."""

    def some(done: int, _of: int, _what: str) -> None:
        progress(before * depth + done, prompts * depth, f"prompt {before + -(-done // depth)} of {prompts}")

    return some

"""Two sweeps in turn: who goes when, and what is left where one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from duat_cli.models.sweep.in_step import in_step


class Blocks:
    """Weights whose pages are numbers, each a block; page 0.5 stands between two of them."""

    def __init__(self) -> None:
        self.turning: Callable[[Any], None] = lambda page: None

    def depth(self, page: float) -> int:
        return int(page)


def sweep(name: str, weights: Blocks, pages: Sequence[float], seen: list[str], fail: float = -1) -> Callable[[], None]:
    def run() -> None:
        seen.append(f"{name} begins")
        try:
            for page in pages:
                weights.turning(page)
                if page == fail:
                    raise ValueError(name)
                seen.append(f"{name}{page}")
        finally:
            seen.append(f"{name} ends")

    return run


def test_the_second_goes_through_each_block_behind_the_first() -> None:
    a, b, seen = Blocks(), Blocks(), list[str]()
    in_step(a, sweep("a", a, [0, 0.5, 1, 2], seen), b, sweep("b", b, [0, 1, 2], seen))
    assert seen == [
        "a begins", "b begins", "a0", "a0.5", "b0", "a1", "b1", "a2", "a ends", "b2", "b ends",
    ]  # fmt: skip


def test_no_wave_begins_before_the_other_sweep_is_through_the_one_before() -> None:
    a, b, seen = Blocks(), Blocks(), list[str]()
    in_step(a, sweep("a", a, [0, 1, 0, 1], seen), b, sweep("b", b, [0, 1, 0, 1], seen))
    assert seen[2:-2] == ["a0", "b0", "a1", "b1", "a0", "b0", "a1", "a ends"]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_fault_of_one_ends_the_other(failing: str) -> None:
    a, b, seen = Blocks(), Blocks(), list[str]()
    before = a.turning, b.turning
    runs = [sweep(n, w, [0, 1], seen, fail=1 if n == failing else -1) for n, w in (("a", a), ("b", b))]
    with pytest.raises(ValueError, match=failing):
        in_step(a, runs[0], b, runs[1])
    assert {"a ends", "b ends"} <= set(seen)
    assert (a.turning, b.turning) == before

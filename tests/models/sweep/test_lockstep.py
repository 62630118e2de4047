"""Passes side by side: every page once, in order, with what each pass needs around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duat_cli.models.sweep.lockstep import one_by_one, side_by_side


class Weights:
    def __init__(self) -> None:
        self.held: Any = None
        self.at_door: Callable[[Any], None] = self.hold
        self.read: list[Any] = []

    def hold(self, page: Any) -> None:
        if self.held is not page:
            self.held = page
            self.read.append(page)


class Walk:
    """Asks for pages in turn and writes down what it did where."""

    def __init__(self, name: str, weights: Weights, pages: list[str], log: list[str], fails: str = "") -> None:
        self.name, self.weights, self.pages, self.log, self.fails = name, weights, pages, log, fails
        self.inside, self.entered = False, 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        assert not self.inside
        self.inside, self.entered = True, self.entered + 1
        try:
            yield
        finally:
            self.inside = False

    def run(self) -> None:
        try:
            for page in self.pages:
                if self.weights.held is not page:
                    self.weights.at_door(page)
                assert self.inside
                assert self.weights.held is page
                if page == self.fails:
                    raise ValueError(page)
                self.log.append(self.name + page)
        finally:
            self.log.append(self.name + "!")


PAGES = ["a", "b", "c"]


def test_every_page_is_read_once_and_the_first_pass_goes_ahead() -> None:
    weights, log, left = Weights(), [], []
    first = Walk("0", weights, PAGES, log)
    others = [Walk("1", weights, PAGES, log), Walk("2", weights, PAGES, log)]
    side_by_side(weights, first, lambda: others if "0a" in log else None, left.append)
    assert weights.read == PAGES
    assert log == ["0a", "1a", "2a", "0b", "1b", "2b", "0c", "0!", "1c", "1!", "2c", "2!"]
    assert left == ["a", "b"]
    assert weights.at_door == weights.hold
    assert all(walk.entered >= 3 for walk in others)


def test_passes_that_begin_late_catch_up() -> None:
    weights, log = Weights(), []
    first = Walk("0", weights, PAGES, log)
    side_by_side(weights, first, lambda: [Walk("1", weights, PAGES, log)] if "0b" in log else None, lambda _page: None)
    assert weights.read == ["a", "b", "a", "b", "c"]
    assert [entry for entry in log if entry.startswith("1")] == ["1a", "1b", "1c", "1!"]
    assert log.index("1b") < log.index("0c")


def test_a_page_that_is_asked_for_again_is_held_for_all() -> None:
    weights, log = Weights(), []
    first = Walk("0", weights, ["a", "a", "b"], log)
    side_by_side(weights, first, lambda: [Walk("1", weights, ["a", "a", "b"], log)], lambda _page: None)
    assert weights.read == ["a", "b"]


@pytest.mark.parametrize("who", ["0", "1"])
def test_an_error_ends_all_passes_and_leaves_nothing_behind(who: str) -> None:
    weights, log = Weights(), []
    walks = [Walk(name, weights, PAGES, log, "b" if name == who else "") for name in "012"]
    with pytest.raises(ValueError, match="b"):
        side_by_side(weights, walks[0], lambda: walks[1:], lambda _page: None)
    assert {"0!", "1!", "2!"} <= set(log)  # each was unwound
    assert not any(walk.inside for walk in walks)
    assert weights.at_door == weights.hold


def test_an_interrupt_passes_through() -> None:
    weights, log = Weights(), []

    class Interrupted(Walk):
        def run(self) -> None:
            self.weights.at_door("a")
            raise KeyboardInterrupt

    walks = [Walk("0", weights, PAGES, log), Interrupted("1", weights, PAGES, log)]
    with pytest.raises(KeyboardInterrupt):
        side_by_side(weights, walks[0], lambda: walks[1:], lambda _page: None)
    assert "0!" in log


def test_with_all_weights_in_memory_passes_run_one_behind_the_other() -> None:
    weights, log = Weights(), []
    one_by_one([Walk(name, weights, PAGES, log) for name in "01"])
    assert log == ["0a", "0b", "0c", "0!", "1a", "1b", "1c", "1!"]

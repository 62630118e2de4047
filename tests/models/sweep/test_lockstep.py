"""Passes side by side: every page once, in order, with what each pass needs around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import helpers
import picture_texts
import pytest
import torch

from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import load_files
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.sweep.lockstep import Guest, forwards, in_step, one_by_one, shown, side_by_side
from duat_cli.zoo import tiny


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


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_plain_passes_side_by_side_give_the_same_from_one_read(model_type: str, tmp_path: Path) -> None:
    tiny.tiny_model(model_type).save_pretrained(tmp_path)
    place, files = Source(tmp_path, "tiny", None), inspect_folder(tmp_path)
    whole, parts = (load_files(place, files, paged=paged) for paged in (False, True))
    ids = [helpers.token_ids(whole.model, tokens=4 + k, seed=k) for k in range(3)]

    def calls(model: Any) -> list[Any]:
        return [functools.partial(helpers.logits_of, model, one) for one in ids]

    assert parts.paged is not None
    expected, got = forwards(None, calls(whole.model)), forwards(parts.paged.pager, calls(parts.model))
    assert all(map(torch.equal, got, expected))
    assert not any(one.requires_grad for one in got)
    assert parts.paged.pager.bytes_read == files.total_bytes


# -- two sweeps in turn: who goes when, and what is left where one of them fails ---------------------------------


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


def test_of_a_text_with_pictures_a_guest_sees_its_blocks_alone() -> None:
    """What the vision part gives is not kept: of a picture in many patches it is several times what the text takes."""
    model = picture_texts.build("qwen3_vl")
    given = picture_texts.inputs("qwen3_vl", model)
    structure, traced = discover(model, given), list[Trace]()

    class Kept(Guest):
        def proved(self, parts: BlockParts, written: Trace) -> None:
            traced.append(written)

    shown(Kept(), structure, given)
    text = set(structure.part.modules())
    assert len(traced) == 3
    assert set(structure.calls) <= traced[0].called() <= text < set(structure.stack.modules())
    assert {call.module for call in traced[0].attention} == {block.self_attn for block in structure.calls}

"""Discovery one block ahead of the passes that use it finds what discovery of a whole model finds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paging import in_parts, pager_of, saved, whole

from duat_cli.models.discovery.attempts import Known, PathError
from duat_cli.models.discovery.structure import Discovery, ModelStructure, discover, run_stack
from duat_cli.models.instrument.attention import ForeignAttentionError
from duat_cli.models.instrument.plain import InstrumentedPass
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.lockstep import side_by_side

TYPES = ["llama", "gpt2", "bert", "albert", "gemma2", "mixtral", "xlm-roberta", "deberta-v2", "bloom", "t5"]


def grown(loaded: Any, listen: Callable[[Discovery, BlockRun], None] = lambda _found, _run: None) -> ModelStructure:
    """listen: called behind every block of a pass beside discovery, with what is discovered so far."""
    found = Discovery(loaded.model, Known(), None, factors=True, device="cpu")

    def others() -> list[Any] | None:
        if not found.ready:
            return None
        forward = InstrumentedPass(found.rig(), lambda: run_stack(found.stack, found.probe), partial(listen, found))
        return [found.proof(), forward]

    with found.attached():
        side_by_side(pager_of(loaded), found, others, lambda page: found.forget(page.doors))
    return found.structure()


@pytest.mark.parametrize("model_type", TYPES)
def test_it_finds_what_discovery_finds(model_type: str, tmp_path: Path) -> None:
    expected = discover(whole(saved(model_type, tmp_path)).model)
    with in_parts(tmp_path) as loaded:
        structure = grown(loaded)
    assert (structure.path, structure.hidden_size) == (expected.path, expected.hidden_size)
    assert structure.uncovered == expected.uncovered
    assert len(structure.calls) == len(expected.calls)
    for mine, theirs in zip(structure.blocks, expected.blocks, strict=True):
        assert mine.parts.name == theirs.parts.name
        assert len(mine.parts.units) == len(theirs.parts.units)
        flags = ("gated", "homogeneous", "direct", "batched", "arrives")
        assert [getattr(mine.parts, f) for f in flags] == [getattr(theirs.parts, f) for f in flags]
        assert (mine.factors is None, mine.factors_reason) == (theirs.factors is None, theirs.factors_reason)


def test_a_block_is_proved_when_another_pass_gets_there_and_its_factors_are_let_go(tmp_path: Path) -> None:
    expected = discover(whole(saved("llama", tmp_path)).model)
    seen = []

    def listen(found: Discovery, run: BlockRun) -> None:
        seen.append([b.factors is not None and not b.factors.heads.value.is_meta for b in found.so_far().blocks])
        here, there = found.so_far().block(run.index).factors, expected.block(run.index).factors
        assert here is not None
        assert there is not None
        assert torch.equal(here.heads.value, there.heads.value)

    with in_parts(tmp_path) as loaded:
        grown(loaded, listen)
    assert seen == [[True], [False, True], [False, False, True]]


def test_what_ends_an_attempt_is_known_to_the_next() -> None:
    known = Known()
    known.learn(PathError())
    assert known.intercepted
    known.learn(ForeignAttentionError("planted"))
    assert not known.interface
    with pytest.raises(ForeignAttentionError, match="again"):  # it was not the interface
        known.learn(ForeignAttentionError("again"))


def test_an_attempt_is_made_anew_with_what_the_one_before_it_showed() -> None:
    known, seen = Known(), list[bool]()

    def attempt() -> str:
        seen.append(known.intercepted)
        if not known.intercepted:
            raise PathError
        return "through"

    assert known.through(attempt) == "through"
    assert seen == [False, True]


def test_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with in_parts(tmp_path) as loaded:
        before = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in loaded.model.named_modules()}
        grown(loaded)
        with contextlib.suppress(ValueError):
            grown(loaded, _fail)
        after = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in loaded.model.named_modules()}
        assert after == before
        assert not any("forward" in vars(m) for m in loaded.model.modules())
        assert loaded.model.config._attn_implementation == "eager"


def _fail(_found: Discovery, run: BlockRun) -> None:
    if run.index == 1:
        raise ValueError("planted")

"""Attention that reaches the stream through a token mixer alone is told from attention that does not."""

from __future__ import annotations

import pytest
import torch
from helpers import first_two, single_model
from torch import Tensor, nn

from duat_cli.analysis.support import examine
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.discovery.in_front import attention_in_front
from duat_cli.models.discovery.structure import discover
from duat_cli.models.edits.reinitialised import reinitialised
from duat_cli.models.instrument.tracing import Trace, Tracer

TYPES = ["zamba", "zamba2"]


class Block(nn.Module):
    """x + mixer(x + front(x)), and what the front gives a second time, in that share."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.mixer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        made = self.front(x)
        moved: Tensor = x + self.mixer(x + made)
        return moved if self.share == 0.0 else moved + self.share * made


def traced(block: Block) -> Trace:
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    found: list[Trace] = []
    tracer = Tracer(block, [block], lambda _event, written: found.append(written), interface=False)
    with tracer.attached(), tracer.active():
        block(x)
    return found[0]


@pytest.mark.parametrize(("share", "found"), [(0.0, True), (1e-3, False)])
def test_it_is_in_front_only_where_nothing_goes_past_the_mixer(share: float, found: bool) -> None:
    block = Block(share)
    written = traced(block)
    parts = BlockParts("0", block, HiddenSlot(0), (block.front[1],), frozenset(), {}, ())
    outer = attention_in_front(parts, block.mixer, written.events[-1], written)
    assert outer is (block.front if found else None)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_module_around_it_is_one_unit_and_the_mixer_has_the_operator(model_type: str) -> None:
    structure = discover(single_model(model_type))
    plain, *hybrid = (block.parts for block in structure.blocks)
    assert len(plain.units) == 1
    for parts in hybrid:
        kinds = [type(unit).__name__ for unit in parts.units]
        assert [kind.endswith(("AttentionDecoderLayer", "MambaMixer")) for kind in kinds] == [True, True]
        assert parts.mixing == set(parts.units)
        assert parts.attention == (parts.units[-1],)
        assert not parts.first_linears
    assert all(block.factors is not None for block in structure.blocks)


def test_where_the_mixer_moves_too_little_to_be_proved_the_sum_is_exact_without_it() -> None:
    """As transformers draws a small one, its mixers carry less from token to token than rounding."""
    entry = examine(reinitialised(first_two(single_model("zamba2"))))
    assert entry.status == "partly"
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5
    assert any(
        "reaches the stream only as part of what the token mixer behind it reads" in part for part in entry.parts
    )
    assert any("mixes tokens without softmax attention" in part for part in entry.parts)

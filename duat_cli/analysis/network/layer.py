"""One layer as the paper's general term (Eq. 20, 31), written out: what the model's own block does to unit vectors.

    x'_j = (W'_{j,1} x'_{j-1} + b'_{j,3}) + W'_{j,3} σ(W'_{j,2} x'_{j-1} + b'_{j,2})

with every dynamic parameter frozen. W'_{j,1} is the frozen block without its FFN: attention, residual paths and norms.
Every column is a replay of the model's own code, so no architecture stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.network.hidden import Hidden
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun, zero_given

ITEM_ELEMENTS = 1 << 19  # of the unit vectors that are replayed at once


@dataclass(frozen=True)
class Layer:
    """The original parameters of one layer; side N M, as row-major vec has it."""

    W1: Tensor  # (side, side)
    b3: Tensor  # (side,)
    hidden: Hidden | None = None  # None: the layer has no FFN, and what follows is empty
    W2: Tensor | None = None  # (N rows, side)
    b2: Tensor | None = None  # (N rows,)
    W3: Tensor | None = None  # (side, N neurons)


def layer_of(run: BlockRun, hidden: Hidden | None, tick: Callable[[int], None]) -> Layer:
    """Of one block under one prompt; hidden: its FFN, whose unit is called once. tick: with the vectors done."""
    tokens, width = run.input.shape[1:]
    side = tokens * width
    base = run.replay(torch.zeros_like(run.input), zero_given(run, 1))
    b3, W1 = base.end.reshape(-1), run.input.new_empty(side, side)
    z0 = base.unit_inputs[0][0] if hidden is not None else None  # what the unit reads, (N, width of it)
    Z = None if z0 is None else z0.new_empty(z0.numel(), side)
    step = max(1, ITEM_ELEMENTS // side)
    for start in range(0, side, step):
        here = slice(start, min(start + step, side))
        count = here.stop - start
        items = run.input.new_zeros(count, side)
        items[torch.arange(count), start + torch.arange(count)] = 1.0
        replay = run.replay(items.reshape(count, tokens, width), zero_given(run, count))
        W1[:, here] = (replay.end - base.end).reshape(count, -1).T
        if Z is not None and z0 is not None:
            Z[:, here] = (replay.unit_inputs[0] - z0).reshape(count, -1).T
        tick(here.stop)
    if hidden is None or Z is None or z0 is None:
        return Layer(W1, b3)
    W3, of_bias = _reaching(run, hidden, base)
    if hidden.first is None:
        W2 = Z
    else:
        first = hidden.first.to(Z).expand(tokens, -1, -1)
        W2 = (first @ Z.reshape(tokens, -1, side)).reshape(-1, side)
    return Layer(W1, b3 + of_bias, hidden, W2, hidden.pre_activation(z0).reshape(-1), W3)


def _reaching(run: BlockRun, hidden: Hidden, base: Replay) -> tuple[Tensor, Tensor]:
    """W'_{j,3}: the unit's last layer, then what the block makes of what the unit gives; and the same of its bias."""
    tokens, side = run.input.shape[1], run.input.numel()
    arriving = _arriving(run, base)  # (N, width of the unit's output, N M)
    last = arriving if hidden.last is None else hidden.last.to(arriving).expand(tokens, -1, -1) @ arriving
    if hidden.last_bias is None:
        of_bias = run.input.new_zeros(side)
    else:
        of_bias = torch.einsum("tw,tws->s", hidden.last_bias.to(arriving).expand(tokens, -1), arriving)
    return last.reshape(-1, side).T.contiguous(), of_bias


def _arriving(run: BlockRun, base: Replay) -> Tensor:
    """What one unit of each feature of the unit's output is in the block's output: (N, width, N M)."""
    tokens, side = run.input.shape[1], run.input.numel()
    like = run.units[0].output
    width = like.shape[-1]
    found = like.new_zeros(tokens, width, side)
    if run.parts.arrives:
        places = torch.arange(side)
        found[places // width, places % width, places] = 1.0
        return found
    total = tokens * width
    step = max(1, ITEM_ELEMENTS // max(side, total))
    for start in range(0, total, step):
        count = min(step, total - start)
        given = like.new_zeros(count, total)
        given[torch.arange(count), start + torch.arange(count)] = 1.0
        zero = torch.zeros_like(run.input).expand(count, -1, -1)
        output = run.replay(zero, [given.reshape(count, *like.shape)]).end
        found.view(total, side)[start : start + count] = (output - base.end).reshape(count, -1)
    return found

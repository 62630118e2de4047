"""What the values of a block are made of while its dynamic parameters are frozen, and where tokens meet beside H."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.models.arrays import random_like
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun, zero_given

SEVERAL = "its values are made of several tokens (a shift or a convolution): V is no map of one token's stream"
BEHIND = "what its attention gives is mixed among tokens on its way to the stream (a convolution)"


def values_of(run: BlockRun, z: Tensor) -> Tensor:
    """The values of the frozen block on `z` (1, N, M): (1, kv_heads, N, d)."""
    return run.replay(z, zero_given(run, 1), stop_at_values=True).values[0]


def made_by_units(run: BlockRun) -> bool:
    """Whether values come of nonlinear units alone (a norm with a gate made of itself, say), not of the stream."""
    if not any(not unit.behind_attention for unit in run.units):
        return False
    return torch.equal(values_of(run, torch.zeros_like(run.input)), values_of(run, random_like(run.input)))


def tokens_mixed(run: BlockRun, read: Callable[[Replay], Tensor]) -> str | None:
    """Where tokens meet beside H, None where they do not: another first token moves the values of the others, or the
    first token's heads move what arrives of others'. read: what of a replay meets the stream."""
    zero = torch.zeros_like(run.input)
    changed = zero.clone()
    changed[:, 0] = random_like(zero)[:, 0]
    if not torch.equal(values_of(run, zero)[:, :, 1:], values_of(run, changed)[:, :, 1:]):
        return SEVERAL
    silent = torch.zeros_like(run.attention[0].output)
    first = silent.clone()
    first[:, 0] = random_like(silent)[:, 0]
    base, moved = (read(run.replay(zero, zero_given(run, 1), attention=heads)) for heads in (silent, first))
    return None if torch.equal(base[:, 1:], moved[:, 1:]) else BEHIND

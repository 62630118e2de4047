"""Inputs of a block beside its stream: other tensors that it is given, or values that an earlier block hands on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from duat_cli.models.arrays import equal, random_like
from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import handed, with_handed
from duat_cli.models.instrument.records import handed_values
from duat_cli.models.instrument.rig import BlockRun


def reads(run: BlockRun, slot: HiddenSlot) -> bool:
    """Whether the replayed block depends on the tensor at `slot`: in its values, in the inputs of its units or in its
    output. A tensor that only queries and keys are made of does not count, because H is held."""
    items, own = torch.zeros_like(run.input), run.call
    given, seen = [u.output[None] for u in run.units], []
    for value in (slot.get(*own), random_like(slot.get(*own))):
        with holding(run, call=slot.put(*own, value)):
            replay = run.replay(items, given)
        seen.append([*replay.values, *replay.unit_inputs, *([] if replay.output is None else [replay.output])])
    return not all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def take_handed(run: BlockRun) -> None:
    """Holds the values of attention as the output of a unit, where an earlier block hands them on."""
    if len(run.attention) != 1 or run.parts.mixer is not None or not _is_handed(run):
        return
    (call,), parts = run.attention, run.parts
    front = [unit.module for unit in run.units if not unit.behind_attention]
    rest = [module for module in parts.units if module not in front]
    given = (t for t in handed(*run.call).values() if t.numel() == call.value.numel())
    ready = any(equal(t.reshape(call.value.shape), call.value) for t in given)
    run.parts = replace(
        parts,
        handed="values" if ready else "latent",
        value_projection=None if ready else parts.from_latent,
        units=(*front, call.module, *rest),
        mixing=parts.mixing | {call.module},
    )
    run.recording.units.insert(len(front), handed_values(call, run.input))


def _is_handed(run: BlockRun) -> bool:
    """Whether the values come from a mapping that the block is given: they do not change with the stream, and change
    with the tensors of the mapping."""
    if not handed(*run.call):
        return False
    zero = torch.zeros_like(run.input)
    before, at_other = (_values(run, z) for z in (zero, random_like(zero)))
    if not all(map(torch.equal, before, at_other)):
        return False
    with holding(run, call=with_handed(*run.call, lambda _, tensor: random_like(tensor))):
        return not all(map(torch.equal, before, _values(run, zero)))


def _values(run: BlockRun, items: Tensor) -> list[Tensor]:
    return run.replay(items, stop_at_values=True).values

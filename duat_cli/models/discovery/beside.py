"""Inputs of a block: its stream, other tensors beside it, and values that an earlier block hands on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import equal, random_like
from duat_cli.models.block.norms import recognise
from duat_cli.models.block.slots import HiddenSlot, taken
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import handed, with_handed
from duat_cli.models.instrument.records import handed_values
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Event, Trace


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


def hidden_slot(event: Event, written: Trace) -> HiddenSlot:
    """The argument that is the block's hidden states: the first floating-point one of rank three, or of rank four where
    it is several streams a token, or without one the first of rank two, if the block returns a tensor of its shape.

    event: a call of the block. written: its trace.
    """
    name = type(event.module).__name__
    first = next((t for t in event.tensors if t.ndim >= 3), None)
    if first is not None and first.ndim == 4 and _gives_alike(event.output, first):
        found = _of_four_axes(event, first, written)
        if found is None:
            raise UnsupportedModelError(
                f"{name} takes and gives states of four axes, which are no streams of a token but a map of tokens, "
                "perhaps; W' is defined for states of shape (batch, N, M)"
            )
        return found
    slots = event.slots
    for key, value in slots:
        if value.ndim == 3:
            again = tuple(other for other, one in slots if one is value and other != key)
            apart = any(len(call.value) == len(value) for call in written.attention)  # sequences of one token each
            return HiddenSlot(key, again=again, turned=value.shape[1] == 1 < len(value) and not apart)
    flat = next(((key, value) for key, value in slots if first is None and value.ndim == 2), None)
    if flat is not None and _gives_alike(event.output, flat[1]):
        return HiddenSlot(flat[0], flat=True)
    raise UnsupportedModelError(f"{name} takes no hidden states of shape (batch, N, M)")


def beside(event: Event, hidden: HiddenSlot, *, any_length: bool = False) -> tuple[HiddenSlot, ...]:
    """The arguments that are other tensors of the stream's shape, such as embeddings or positions. any_length: also
    those of its width but another number of tokens."""
    shape = taken(event.args, event.kwargs, hidden.key).shape  # in the block's own layout
    return tuple(
        HiddenSlot(key, turned=hidden.turned, grid=None if hidden.grid is None else (value.shape[1], value.shape[2]))
        for key, value in event.slots
        if key not in (hidden.key, *hidden.again)
        if value.shape == shape or (any_length and value.ndim == len(shape) and value.shape[-1] == shape[-1])
    )


def _of_four_axes(event: Event, states: Tensor, written: Trace) -> HiddenSlot | None:
    """The slot of states of rank four: of several streams a token, (1, N, streams, width) or (streams, 1, N, width),
    where the modules inside the block take one stream, (1, N, width); of a map of tokens, (1, height, width, M), where
    a linear layer or norm of vectors on the last axis takes it as it is. None for others."""
    inner = {t.shape for one in written.events for t in one.tensors if one.module is not event.module and t.ndim == 3}
    key = next(key for key, value in event.slots if value is states)
    front, middle, behind, width = states.shape
    if front == 1 and (1, middle, width) in inner:
        return HiddenSlot(key, streams=behind)
    if middle == 1 and (1, behind, width) in inner:
        return HiddenSlot(key, streams=front, first=True)
    whole = [e for e in written.events if e.tensors and e.tensors[0].shape == states.shape]
    mapped = any(_takes_last_axis(e) for e in whole)
    return HiddenSlot(key, grid=(middle, behind)) if front == 1 and mapped else None


def _takes_last_axis(event: Event) -> bool:
    """Whether the called module is a linear layer of vectors on the last axis, or their norm: one of channels in front
    may have a weight as long where the map is as wide."""
    x, weight = event.tensors[0], getattr(event.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] != x.shape[-1] or event.result is None:
        return False
    return weight.ndim == 2 or (weight.ndim == 1 and recognise(event.module, x, event.result) is not None)


def _gives_alike(output: Any, like: Tensor) -> bool:
    several = output if isinstance(output, (tuple, list)) else [output]
    return any(isinstance(one, Tensor) and one.shape == like.shape for one in several)

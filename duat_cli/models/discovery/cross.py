"""Cross-attention of a decoder block, found by what it reads: its values are made of a second stream from outside.

Its H (N tokens x K tokens of the encoder) is a dynamic parameter. With H held it is affine in the encoder's states,
which pass through no block of the stack, so its output is one more term of the stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, same_storage, tolerance_for
from duat_cli.models.block.parts import BlockParts, CrossAttention, Projection
from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.projections import output_projection, value_layer, value_projection


def find_cross(block: Event, hidden: HiddenSlot, written: Trace) -> CrossAttention | None:
    """The attention module of a block that reads another stream. Raises UnsupportedModelError if there are several."""
    own = hidden.get(block.args, block.kwargs)
    given = [(slot, states) for slot, states in _streams(block) if not same_storage(states, own)]
    found: dict[int, CrossAttention] = {}
    for call in written.attention:
        for taken, states in given:
            slot = _reads(call, states, written)
            if slot is not None:
                found.setdefault(id(call.module), CrossAttention(call.module, slot, taken))
    if len(found) > 1:
        raise UnsupportedModelError(f"{type(block.module).__name__} has {len(found)} cross-attentions; duat reads one")
    return next(iter(found.values()), None)


def require_apart(block: Event, parts: BlockParts, states: Tensor) -> None:
    """Refuses a block that takes the encoder's states, but has no cross-attention for them."""
    taken = (*block.args, *block.kwargs.values())
    if parts.cross is None and any(isinstance(t, Tensor) and same_storage(t, states) for t in taken):
        raise UnsupportedModelError(
            f"{type(block.module).__name__} takes the encoder's states, but no attention of its own reads them alone"
        )


def with_projections(parts: BlockParts, event: Event, written: Trace) -> BlockParts:
    """The block with the layers from which V and O of its cross-attention can be read."""
    if parts.cross is None:
        return parts
    cross, call = parts.cross, next(c for c in written.attention if c.module is parts.cross.module)
    states = cross.taken.get(event.args, event.kwargs)
    return replace(
        parts,
        cross=replace(
            cross,
            value_projection=value_projection(states, parts, written, call) or _copied(states, parts, written, call),
            output_projection=output_projection(parts, written, call),
        ),
    )


def _copied(states: Tensor, parts: BlockParts, written: Trace, call: AttentionCall) -> Projection | None:
    """The layer that reads the states and whose output features are copied into the values, found by their numbers."""
    try:
        event, columns = value_layer(written, call, parts)
    except UnsupportedModelError:
        return None
    return Projection(event.module, None, columns) if same_storage(event.tensors[0], states) else None


def cross_fault(run: BlockRun) -> str | None:
    """The fault of cross-attention as an affine map of the encoder's states with H held; None where there is none."""
    cross = run.recording.cross
    if cross is None:
        return "its cross-attention runs more than once, or not at all"
    states, other = cross.states, random_like(cross.states)
    at_0, at_e, at_r, at_sum = run.crossed(torch.cat([torch.zeros_like(states), states, other, states + other])).end
    error = relative_error(at_e + at_r - at_0, at_sum)
    if not error <= tolerance_for(states.dtype):
        return f"its cross-attention is not affine in the encoder's states (relative error {error:.1e})"
    own = next(u for u in run.units if run.parts.is_cross(u.module))
    error = relative_error(at_e, own.output.reshape(at_e.shape))
    if not error <= tolerance_for(states.dtype):
        return f"the replay of its cross-attention does not give its own output (relative error {error:.1e})"
    return None


def gives_nothing_for_zero(run: BlockRun) -> bool:
    """Whether a block has no cross-attention, or one whose output is exactly zero for zero states."""
    if run.parts.cross is None or run.recording.cross is None:
        return True
    output = run.crossed(torch.zeros_like(run.recording.cross.states)).output
    return output is not None and not bool(output.any())


def _streams(event: Event) -> list[tuple[HiddenSlot, Tensor]]:
    """The arguments of a call that are states of tokens, in order."""
    return [(HiddenSlot(key), value) for key, value in event.slots if value.ndim == 3]


def _reads(call: AttentionCall, states: Tensor, written: Trace) -> HiddenSlot | None:
    """The argument in which the attention module takes these states; None unless a layer inside it reads them and it
    has one value per token."""
    if call.value.shape[2] != states.shape[1] or not written.calls(call.module):
        return None
    inside = set(call.module.modules())
    read = any(e.module in inside and e.tensors and same_storage(e.tensors[0], states) for e in written.events)
    slots = [slot for slot, value in _streams(written.calls(call.module)[0])[1:] if same_storage(value, states)]
    return slots[0] if read and slots else None

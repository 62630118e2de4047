"""Where the head factors can be read from weights: found by following memory, not names.

The values that attention gets are a view of some linear layer's output; offset and strides of that view tell which
of its columns belong to which head, so fused, interleaved and grouped projections need no table. What is read here
is a proposal: factors.py uses it only where a probe confirms it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import same_storage
from duat_cli.models.block.parts import BlockParts, OutputSource, ValueSource
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace


def value_source(block: Event, parts: BlockParts, written: Trace, call: AttentionCall) -> ValueSource | None:
    """The layer and columns that make the values, or None where the values are no plain view of one layer."""
    event = _maker(call.module, written, call.value)
    if event is None or event.result is None:
        return None
    columns = _columns(call.value, event.result)
    if columns is None or not event.tensors:
        return None
    whole = torch.equal(columns.flatten(), torch.arange(event.result.shape[-1]))
    hidden, read = parts.hidden.get(block.args, block.kwargs), event.tensors[0]
    if same_storage(read, hidden):
        return ValueSource(event.module, columns, None, whole)
    for norm in parts.norms:
        for norm_event in written.calls(norm):
            made = norm_event.result
            if made is not None and same_storage(made, read) and same_storage(norm_event.tensors[0], hidden):
                return ValueSource(event.module, columns, norm, whole)
    return None


def output_source(parts: BlockParts, written: Trace, call: AttentionCall) -> OutputSource | None:
    """The first layer behind attention that takes heads * d features, and a norm that reads its output."""
    _, _, heads, width = call.output.shape
    behind = written.events_after(call)
    inside = set(parts.module.modules())
    for event in behind:
        if event.module not in inside or any(event.module.children()) or not has_matrix(event.module):
            continue
        if not event.tensors or event.tensors[0].shape[-1] != heads * width or event.result is None:
            continue
        norm = next(
            (e.module for e in behind if e.module in parts.norms and same_storage(e.tensors[0], event.result)),
            None,
        )
        return OutputSource(event.module, norm)
    return None


def has_matrix(module: nn.Module) -> bool:
    """Whether a module holds one matrix to multiply by."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _maker(attention: nn.Module, written: Trace, value: Tensor) -> Event | None:
    inside = set(attention.modules())
    for event in reversed(written.events):
        leaf = event.module in inside and not any(event.module.children())
        if leaf and event.result is not None and same_storage(event.result, value) and has_matrix(event.module):
            return event
    return None


def _columns(value: Tensor, made: Tensor) -> Tensor | None:
    """value (1, kv_heads, N, d) as columns of made (1, N, C): index (kv_heads, d), or None if it is no such view."""
    features = made.shape[-1]
    if not made.is_contiguous() or value.stride(2) != features:
        return None
    head = torch.arange(value.shape[1])[:, None] * int(value.stride(1))
    place = torch.arange(value.shape[3])[None, :] * int(value.stride(3))
    columns = head + place + int(value.storage_offset() - made.storage_offset())
    if int(columns.min()) < 0 or int(columns.max()) >= features:
        return None
    return columns

"""The layers from which V and O of a block's heads can be read: found by following memory or numbers, not names.

The values that attention gets are a view of some linear layer's output; offset and strides of that view tell which
of its columns belong to which head, so fused, interleaved and grouped projections need no table. A layer found in this
way is only a proposal: factors.py uses it where a probe confirms it. A bound on heads needs V and O with the biases of
these layers, their input, and attention whose rows are averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import equal, same_storage, tolerance_for, wide
from duat_cli.models.block.linears import bias_of, has_matrix, matrix_of
from duat_cli.models.block.norms import recognise
from duat_cli.models.block.parts import BlockParts, Projection
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.operators.kronecker import HeadFactors


def value_projection(hidden: Tensor, parts: BlockParts, written: Trace, call: AttentionCall) -> Projection | None:
    """The layer and columns that make the values, or None where the values are no plain view of one layer's output.

    hidden: the block's input that they are made of.
    """
    made = _made(written, call)
    if made is None:
        return None
    event, columns = made
    read = event.tensors[0]
    if _same_tokens(read, hidden):
        return Projection(event.module, None, columns)
    for norm in parts.norms:
        for norm_event in written.calls(norm):
            normed = norm_event.result
            if normed is None or not _same_tokens(read, normed):
                continue
            if parts.streams > 1 or same_storage(norm_event.tensors[0], hidden):  # it reads what streams are weighed to
                return Projection(event.module, norm, columns)
    return None


def latent_projection(handed: Iterable[Tensor], written: Trace, call: AttentionCall) -> Projection | None:
    """The layer and columns that make the values of one of these tensors, inputs of the block beside its stream."""
    given = list(handed)
    made = _made(written, call) if given else None
    if made is None or not any(same_storage(made[0].tensors[0], tensor) for tensor in given):
        return None
    return Projection(made[0].module, None, made[1])


def _same_tokens(laid: Tensor, tokens: Tensor) -> bool:
    """Whether a tensor holds `tokens`, (1, N, width): in the same memory, or copied into windows (W, n, width)."""
    if same_storage(laid, tokens):
        return True
    if laid.ndim != 3 or laid.shape[-1] != tokens.shape[-1] or laid.shape[:2] == tokens.shape[:2]:
        return False
    return _rows(tokens) <= _rows(laid)


def _rows(tensor: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in _plain(tensor.flatten(0, 1).contiguous())}


def output_projection(parts: BlockParts, written: Trace, call: AttentionCall) -> Projection | None:
    """The first layer behind attention that takes heads * d features, and a norm that reads its output. A layer whose
    input was also read in front of attention, such as that of a gate, is passed over; so is one outside the module of
    attention that reads the norm of something else than H V: an FFN's, where that module holds its own residual."""
    _, _, heads, width = call.output.shape
    count = written.ended_before[id(call)]
    read, behind = [event.tensors[0] for event in written.events[:count] if event.tensors], written.events[count:]
    inside, own = set(parts.module.modules()), set(call.module.modules())
    for event in behind:
        if event.module not in inside or any(event.module.children()) or not has_matrix(event.module):
            continue
        if not event.tensors or event.result is None:
            continue
        x = event.tensors[0]
        if not _takes_heads(x, heads, width):
            continue
        if any(same_storage(x, other) for other in read):
            continue
        made = next((e for e in behind if e.module in parts.norms and same_storage(needed(e.result), x)), None)
        if made is not None and event.module not in own and not equal(made.tensors[0], call.output.flatten(2)):
            continue
        norm = next(
            (e.module for e in behind if e.module in parts.norms and _same_tokens(event.result, e.tensors[0])), None
        )
        return Projection(event.module, norm)
    return None


def _takes_heads(x: Tensor, heads: int, width: int) -> bool:
    """Whether x is wide enough for the concatenated heads, (…, heads * d), or, W windows with their heads on one axis,
    for those of one window, (W, …, heads / W * d)."""
    of_window = len(x) > 1 and x.shape[-1] * len(x) == heads * width and x.shape[-1] % width == 0
    return x.shape[-1] == heads * width or of_window


def projects_to_zero(parts: BlockParts) -> bool:
    """Whether attention's output projection is all zero, so that attention adds nothing in the real block either."""
    projection = parts.output_projection
    weight = None if projection is None else getattr(projection.linear, "weight", None)
    return isinstance(weight, Tensor) and not bool(weight.any())


def value_layer(written: Trace, call: AttentionCall, parts: BlockParts) -> tuple[Event, Tensor]:
    """The linear layer whose output features are the values, and the index of these features, (kv_heads, d).

    They are matched by their numbers, not by storage, because some models split fused layers by copying.
    """
    values = call.value[0].transpose(1, 2).flatten(0, 1)  # (kv_heads d, N)
    inside = set(parts.module.modules())
    for event in reversed(written.events):
        made = event.result
        leaf = event.module in inside and isinstance(getattr(event.module, "weight", None), Tensor)
        if not leaf or made is None or not event.tensors or made.shape[-2:-1] != values.shape[1:]:
            continue
        if made.numel() != made.shape[-2] * made.shape[-1] or _is_elementwise(event):
            continue
        features = made.reshape(made.shape[-2:]).T.contiguous()  # (C, N)
        places = {row.numpy().tobytes(): k for k, row in enumerate(_plain(features))}
        found = [places.get(row.numpy().tobytes()) for row in _plain(values.contiguous())]
        if all(place is not None for place in found):
            index = torch.tensor([int(p) for p in found if p is not None])
            return event, index.reshape(call.value.shape[1], call.value.shape[3])
    raise UnsupportedModelError("its values are not what one linear layer gives")


def layer_factors(parts: BlockParts, written: Trace, call: AttentionCall) -> tuple[Tensor, HeadFactors]:
    """The input z (1, N, width) of the layer that makes an attention call's values, as the trace holds it, and V and O.

    V and O have the biases of the layers that make the values and take the heads; norms stay outside.
    """
    if parts.gated:
        raise UnsupportedModelError("a gate inside attention scales its channels")
    if parts.output_projection is None:
        raise UnsupportedModelError("no linear layer takes its concatenated heads")
    event, columns = value_layer(written, call, parts)
    width = event.tensors[0].shape[-1]
    bias = bias_of(event.module, width)
    heads, rank = call.output.shape[2:]
    last = parts.output_projection.linear
    matrix = matrix_of(event.module, width)
    return event.tensors[0], HeadFactors(
        value=matrix[:, columns.to(matrix.device)].permute(1, 0, 2),
        output=matrix_of(last, heads * rank).reshape(heads, rank, -1),
        value_bias=None if bias is None else bias[columns.to(bias.device)],
        output_bias=bias_of(last, heads * rank),
    )


def require_averages(call: AttentionCall) -> None:
    """Refuses attention whose rows are no averages: a bound on heads needs entries ≥ 0 and rows that sum to ≤ 1."""
    for _, rows in call.rows.chunks():
        slack = tolerance_for(rows.dtype)
        if float(rows.min()) < -slack:
            raise UnsupportedModelError("its attention has negative entries, so a head may add more than any one value")
        if float(wide(rows).sum(dim=-1).max()) > 1 + slack:
            raise UnsupportedModelError("rows of its attention sum to more than 1")


def norm_before(events: Sequence[Event], source: Tensor) -> nn.Module:
    """The norm among these calls that `source` is the output of. Raises UnsupportedModelError where there is none."""
    for event in events:
        if any(event.module.children()) or len(event.tensors) != 1 or not equal(event.result, source):
            continue
        x = event.tensors[0]
        with torch.no_grad():
            form = recognise(event.module, x, source.reshape(x.shape)) if x.numel() == source.numel() else None
        if form is not None:
            return event.module
    raise UnsupportedModelError("what it reads is not the output of a norm, so it has no largest size")


def _made(written: Trace, call: AttentionCall) -> tuple[Event, Tensor] | None:
    """The call of the layer that makes the values, and the columns of its output that they are; None where they are no
    such columns, or where the call has no tensor as input."""
    inside = set(call.module.modules())
    for event in reversed(written.events):
        leaf = event.module in inside and not any(event.module.children())
        if leaf and event.result is not None and same_storage(event.result, call.value) and has_matrix(event.module):
            columns = _columns(call.value, event.result)
            return None if columns is None or not event.tensors else (event, columns)
    return None


def _columns(value: Tensor, made: Tensor) -> Tensor | None:
    """The columns of made (W, N, C) that value (W, kv_heads, N, d) is a view of: (kv_heads, d); None if it is none."""
    features = made.shape[-1]
    if not made.is_contiguous() or value.stride(2) != features:
        return None
    head = torch.arange(value.shape[1])[:, None] * int(value.stride(1))
    place = torch.arange(value.shape[3])[None, :] * int(value.stride(3))
    columns = head + place + int(value.storage_offset() - made.storage_offset())
    if int(columns.min()) < 0 or int(columns.max()) >= features:
        return None
    return columns


def _is_elementwise(event: Event) -> bool:
    """Whether a layer has a vector as weight, as norms have."""
    weight = event.module.weight
    return isinstance(weight, Tensor) and weight.ndim < 2


def _plain(rows: Tensor) -> Tensor:
    """The rows on the CPU in float32 or wider, an exact conversion, so that bytes can be compared."""
    return wide(rows).cpu() + 0.0  # -0 becomes 0

"""The value path of a block's heads with everything that a bound needs: what feeds it, V, O and their biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import tolerance_for, wide
from duat_cli.models.block.norms import recognise
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.terms.feedforward import bias_of, equal, matrix_of


@dataclass(frozen=True)
class ValuePath:
    """Values v_j = V_hᵀ z_j + p_h, and what the concatenated heads are multiplied with."""

    source: Tensor  # z, as the trace holds it: (1, N, width)
    value: Tensor  # V, (kv_heads, width, d)
    value_bias: Tensor | None  # p, (kv_heads, d)
    output: Tensor  # O, (heads, d, M)
    output_bias: Tensor | None  # (M,)

    @property
    def groups(self) -> int:
        return self.output.shape[0] // self.value.shape[0]


def value_path(parts: BlockParts, written: Trace, call: AttentionCall) -> ValuePath:
    """V and O of one attention call, as the layers that make its values and take its heads apply them."""
    if parts.gated:
        raise UnsupportedModelError("a gate inside attention scales its channels")
    if parts.output_source is None:
        raise UnsupportedModelError("no linear layer takes its concatenated heads")
    event, columns = _maker(written, call, parts)
    width = event.tensors[0].shape[-1]
    matrix = matrix_of(event.module, width)
    bias = bias_of(event.module, width)
    heads, rank = call.output.shape[2:]
    output = matrix_of(parts.output_source.linear, heads * rank)
    return ValuePath(
        source=event.tensors[0],
        value=matrix[:, columns.to(matrix.device)].permute(1, 0, 2),
        value_bias=None if bias is None else bias[columns.to(bias.device)],
        output=output.reshape(heads, rank, -1),
        output_bias=bias_of(parts.output_source.linear, heads * rank),
    )


def require_averages(call: AttentionCall) -> None:
    """Refuse attention whose rows are no averages: a bound on heads needs entries ≥ 0 and rows that sum to ≤ 1."""
    for _, rows in call.rows.chunks():
        slack = tolerance_for(rows.dtype)
        if float(rows.min()) < -slack:
            raise UnsupportedModelError("its attention has negative entries, so a head may add more than any one value")
        if float(wide(rows).sum(dim=-1).max()) > 1 + slack:
            raise UnsupportedModelError("rows of its attention sum to more than 1")


def _maker(written: Trace, call: AttentionCall, parts: BlockParts) -> tuple[Event, Tensor]:
    """The linear layer whose output features are the values, and which: (kv_heads, d). Matched by the numbers.

    Storage would not do here: fused layers are split by copying in some models.
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


def _is_elementwise(event: Event) -> bool:
    """Norms keep their gain in a vector."""
    weight = event.module.weight
    return isinstance(weight, Tensor) and weight.ndim < 2


def _plain(rows: Tensor) -> Tensor:
    """Exact in float32 or wider, on the CPU, where bytes can be compared."""
    return wide(rows).cpu() + 0.0  # -0 becomes 0


def norm_before(written: Trace, source: Tensor) -> nn.Module:
    """The norm whose output `source` is; UnsupportedModelError where it is read past any norm."""
    for event in written.events:
        if any(event.module.children()) or len(event.tensors) != 1 or not equal(event.result, source):
            continue
        x = event.tensors[0]
        with torch.no_grad():
            form = recognise(event.module, x, source.reshape(x.shape)) if x.numel() == source.numel() else None
        if form is not None:
            return event.module
    raise UnsupportedModelError("what it reads is not the output of a norm, so it has no largest size")

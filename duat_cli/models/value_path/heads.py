"""What a bound on heads needs: V and O with their biases, what feeds them, and attention whose rows are averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import equal, tolerance_for, wide
from duat_cli.models.block.linears import bias_of, matrix_of
from duat_cli.models.block.norms import recognise
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.projections import value_layer
from duat_cli.operators.kronecker import HeadFactors


def layer_factors(parts: BlockParts, written: Trace, call: AttentionCall) -> tuple[Tensor, HeadFactors]:
    """What the values of one attention call are made of, z (1, N, width) as the trace holds it, and V and O.

    V and O with their biases, as the layers that make its values and take its heads apply them: norms stay outside.
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
    """Refuse attention whose rows are no averages: a bound on heads needs entries ≥ 0 and rows that sum to ≤ 1."""
    for _, rows in call.rows.chunks():
        slack = tolerance_for(rows.dtype)
        if float(rows.min()) < -slack:
            raise UnsupportedModelError("its attention has negative entries, so a head may add more than any one value")
        if float(wide(rows).sum(dim=-1).max()) > 1 + slack:
            raise UnsupportedModelError("rows of its attention sum to more than 1")


def norm_before(events: Sequence[Event], source: Tensor) -> nn.Module:
    """The norm among these calls whose output `source` is; UnsupportedModelError where there is none."""
    for event in events:
        if any(event.module.children()) or len(event.tensors) != 1 or not equal(event.result, source):
            continue
        x = event.tensors[0]
        with torch.no_grad():
            form = recognise(event.module, x, source.reshape(x.shape)) if x.numel() == source.numel() else None
        if form is not None:
            return event.module
    raise UnsupportedModelError("what it reads is not the output of a norm, so it has no largest size")

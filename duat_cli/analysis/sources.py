"""The tokens of x_0 through the frozen blocks one by one, under the captured attention weights and uniform ones."""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.attention import AttentionCall, StoredRows
from duat_cli.models.instrument.held import attending
from duat_cli.models.instrument.rig import BlockRun, zero_given
from duat_cli.operators.uniform import uniform_rows

ELEMENTS = 1 << 22  # of the source tokens' pieces that are replayed at once


def advance_sources(
    run: BlockRun, linear: Tensor, sources: Tensor | None, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both through this block, item j is what token j of x_0 has become: (N, N, M). linear: x_0, where none is yet.

    uniform: as `sources`, but that every H of every block is uniform over the tokens that its rows may see. Weights and
    scales of norms are the same.
    """
    if run.output.shape != run.input.shape:
        before, after = (t.shape[1] for t in (run.input, run.output))
        raise UnsupportedModelError(
            f"block {run.index} makes {after} tokens of {before}; --end-to-end relates every token of the output to "
            "that of the input"
        )
    if sources is None or uniform is None:
        tokens = len(linear)
        sources = uniform = torch.eye(tokens, dtype=linear.dtype, device=linear.device)[..., None] * linear
    own = _through(run, sources)
    with attending(run, [_uniform(call) for call in run.attention]):
        return own, _through(run, uniform)


def _through(run: BlockRun, items: Tensor) -> Tensor:
    """T z of every item, some at once: the constants of the block are left out."""
    base = run.replay(torch.zeros_like(run.input), zero_given(run, 1)).end
    pieces = items.split(max(1, ELEMENTS // items[0].numel()))
    return torch.cat([run.replay(some, zero_given(run, len(some))).end - base for some in pieces])


def _uniform(call: AttentionCall) -> StoredRows:
    """Every row 1 / n over the n tokens that the mask leaves it; without a mask, those that some head reaches."""
    seen = call.allowed
    if seen is None or call.rows.tokens != seen.shape[-1]:
        seen = torch.cat([weights.abs().amax(dim=0) > 0 for _, weights in call.rows.chunks()])
    return StoredRows(uniform_rows(seen, call.rows.heads, call.value.dtype))

"""W' where a token has several streams: the weights with which attention reads them, and reaches them.

Attention reads x̃_j = Σ_t w_j[t] x_j[t] over the streams t of token j, and adds its output to stream s of token i with
a weight u_i[s]. With w_j and u_i of length one, W' of all streams is U W' Wᵀ, where W' is that between x̃ and one stream
of outputs, and U and W have orthonormal columns. So both have the same singular values and norms, token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import fit, fit_heads, random_like, relative_error, relative_errors, wide
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.operators.kronecker import HeadFactors

WEIGHED = "a token has several streams, and its W' is that of their unit weights; inspect has its numbers"
DIFFERS = "a token has several streams, which every input weighs in its own way; two W' are not laid beside each other"


Reached = tuple[Tensor, Tensor | None, list[float]]
"""t, (N,); the weights of the streams that are reached, (N, streams), None for one stream; each prompt's residual."""


def apart(x: Tensor, width: int) -> Tensor:
    """Streams (…, streams * width) as (…, streams, width)."""
    return x.unflatten(-1, (-1, width))


def weighed(x: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of each token's streams, (N, width), for x (N, streams * width); x itself without weights."""
    return x if weights is None else torch.einsum("ns,nsw->nw", weights, apart(x, x.shape[-1] // weights.shape[-1]))


def spread(y: Tensor, weights: Tensor | None) -> Tensor:
    """What `y`, (N, width), adds to the streams of each token, (N, streams * width); y itself without weights."""
    return y if weights is None else (weights[..., None] * y[:, None]).flatten(1)


def reading_weights(run: BlockRun, heads: HeadFactors) -> tuple[Tensor, float]:
    """The weights w of the streams that V reads, (N, streams), and the relative error of values made with them.

    Each stream is probed by itself. Raises UnsupportedModelError where V does not read streams of one width.
    """
    stream = random_like(run.input)
    if stream.shape[-1] % heads.width:
        raise UnsupportedModelError("its values are no map of streams of one width")
    each = apart(stream, heads.width)  # (1, N, streams, width)
    count = each.shape[2]
    alone = (each * torch.eye(count, dtype=each.dtype, device=each.device)[:, None, :, None]).flatten(2)
    values = run.replay(torch.cat([torch.zeros_like(stream), alone]), stop_at_values=True).values[0]
    moved = wide(values[1:]) - wide(values[:1])  # (streams, kv_heads, N, d)
    product = torch.stack([heads.values_of(wide(each[0, :, place])) for place in range(count)])
    scale = torch.stack([fit_heads(*pair) for pair in zip(product, moved, strict=True)])[..., 0].permute(2, 1, 0)
    weights: Tensor = torch.linalg.svd(scale, full_matrices=False).Vh[:, 0]  # (N, streams), the same for all heads
    length = scale @ weights[..., None]  # (N, kv_heads, 1)
    weights = weights * torch.where(length.sum(dim=1) < 0, -1.0, 1.0)
    fitted = (scale @ weights[..., None]) * weights[:, None]  # (N, kv_heads, streams)
    return weights, relative_error(fitted.permute(2, 1, 0)[..., None] * product, moved)


def reaching_weights(direction: Tensor, target: Tensor, prompts: int) -> Reached:
    """t and the weights u of the streams where t_i u_i direction_i arrives.

    direction: (N, width). target: what arrives, (N, width) or (N, streams * width).
    """
    if target.shape == direction.shape:
        scale = fit(direction, target)
        return scale[:, 0], None, relative_errors(scale * direction, target, prompts)
    if len(target) != len(direction):
        raise UnsupportedModelError("what its attention adds is met stream by stream, each as a token of its own")
    every = apart(target, direction.shape[-1])
    scale = fit(direction[:, None].expand_as(every), every)  # (N, streams, 1)
    errors = relative_errors((scale * direction[:, None]).flatten(1), target, prompts)
    length = torch.linalg.vector_norm(scale, dim=1)  # (N, 1)
    return length[:, 0], scale[..., 0] / length.clamp_min(torch.finfo(length.dtype).tiny), errors

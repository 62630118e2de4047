"""Values that a linear map makes of several tokens, such as a mix with the token in front, taken apart by distance.

    v_i = Σ_k s_{i-k} x_{i-k} V_k + constant,      so that H v = Σ_k (H S_k) (s ∘ x) V_k,   S_k from token j to j + k

and W' is a sum of Kronecker products with every head once for each offset k. The scale s of the norm in front belongs
to the token that is read, and is the same for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, random_like, relative_error, wide
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.probed import values_of
from duat_cli.operators.kronecker import shifted

MOST = 4  # largest number of offsets
SEED = 41


def offsets_of(run: BlockRun) -> tuple[int, ...]:
    """How far behind a token the values stand that depend on it, while dynamic parameters are frozen.

    Raises UnsupportedModelError where these are not the same few offsets for every token, those beyond the ends aside.
    """
    zero = torch.zeros_like(run.input)
    base, tokens, noise = values_of(run, zero), zero.shape[1], random_like(zero)
    found: list[set[int]] = []
    for token in range(tokens):
        z = zero.clone()
        z[:, token] = noise[:, token]
        moved = (values_of(run, z) - base).abs().amax(dim=(0, 1, 3))  # (N,)
        found.append({place - token for place in moved.nonzero().flatten().tolist()})
    every = set().union(*found)
    known = all(own == {k for k in every if 0 <= token + k < tokens} for token, own in enumerate(found))
    if not known or len(every) > MOST or max(every) - min(every) >= tokens:
        raise UnsupportedModelError("its values are made of other tokens for each of them")
    return tuple(sorted(every, key=abs))


def values_by_offset(run: BlockRun, z: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The share of each token of `z` (1, N, M) in the value at each offset from it: (offsets kv_heads, N, d), zero
    beyond the ends. Tokens are placed so far apart that each value depends on one of them."""
    stride, zero = max(offsets) - min(offsets) + 1, torch.zeros_like(z)
    base, parts = values_of(run, zero)[0], []
    for first in range(stride):
        some = zero.clone()
        some[:, first::stride] = z[:, first::stride]
        moved = values_of(run, some)[0] - base  # (kv_heads, N, d)
        parts.append(torch.cat([shifted(moved, offset, -2) for offset in offsets]))
    own = torch.arange(z.shape[1], device=z.device) % stride  # the part in which each token stands
    return torch.stack(parts).take_along_dim(own[None, None, :, None], dim=0)[0]


def source_scale(product: Tensor, target: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, float]:
    """s, (offsets kv_heads, N, 1), such that s x V are the values by offset, and the relative error of that fit.

    product: x V, (offsets kv_heads, N, d). target: as from `values_by_offset`.
    """
    there = torch.ones_like(product).unflatten(0, (len(offsets), -1))
    there = torch.cat([shifted(one, k, -2) for one, k in zip(there, offsets, strict=True)])
    known = product * there
    square = known.square().sum(dim=(0, 2), keepdim=True).clamp_min(torch.finfo(known.dtype).tiny)
    scale = (known * target).sum(dim=(0, 2), keepdim=True) / square
    return scale.expand(len(product), -1, 1), relative_error(scale * known, target)


def probe_values(run: BlockRun, offsets: tuple[int, ...]) -> Tensor:
    """V row by row, (offsets kv_heads, M, d), from unit vectors through the frozen block, up to the kernel."""
    _, tokens, width = run.input.shape
    like = run.input
    vector = gaussian((1, 1, width), like, SEED).expand(1, tokens, width)
    moved = wide(values_by_offset(run, vector, offsets))
    inner = range(max(0, -min(offsets)), tokens - max(0, *offsets))  # tokens for which every offset leads to a token
    reference = moved[:, inner[0]][:, None].expand_as(moved)
    scale, _ = source_scale(reference, moved, offsets)
    rows = []
    for first in range(0, width, len(inner)):
        count = min(len(inner), width - first)
        unit = torch.zeros_like(like)
        unit[0, torch.arange(count) + inner[0], first + torch.arange(count)] = 1.0
        rows.append((wide(values_by_offset(run, unit, offsets)) / scale)[:, inner[0] : inner[0] + count])
    return torch.cat(rows, dim=1)

"""How many entries of W' exceed a threshold: exactly where W' is small, else from a uniform sample.

The sample pairs entries (a, b) of the head maps, drawn once a checkpoint, with token pairs (i, j) drawn anew for
every input among the nonzero blocks; each entry Σ_h Ĥ_h[i, j] A_h[a, b] is then a uniform draw from those blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors

ENTRIES_AT_ONCE = 1 << 16  # what caches hold
Z_95 = 1.959963984540054


@dataclass(frozen=True)
class ShareEstimate:
    """A share with its 95 % interval; low = share = high where it was counted exactly."""

    share: float
    low: float
    high: float


def sample_entries(factors: HeadFactors, count: int, seed: int, first: int | None = None) -> Tensor:
    """`count` uniform draws (a, b), as the vectors (A_1[a, b] … A_h[a, b]): (count, heads).

    first: compute only so many of these draws.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes, device = (factors.width, factors.hidden_size), factors.value.device
    a, b = (torch.randint(size, (count,), generator=generator).to(device)[:first] for size in sizes)
    values = factors.value.transpose(0, 1)[a]  # (count, kv_heads, d); whole rows, as they lie in memory
    outputs = factors.output.permute(2, 0, 1)[b].unflatten(1, (len(factors.value), factors.groups))
    return (values[:, :, None] * outputs).sum(dim=-1).flatten(1)


def exact_share(left: Tensor, maps: Tensor, cutoff: float) -> ShareEstimate:
    """The share of entries of W' with |w| > cutoff, 0 at least, counted over all blocks that are not zero.

    left: all rows of Ĥ, or some, (heads, rows, N); maps: every A_h, (heads, width, M).
    """
    heads, rows, tokens = left.shape
    maps = maps.reshape(heads, -1)  # (heads, width M)
    pairs = left.flatten(1).T  # (rows N, heads)
    pairs = pairs[pairs.any(dim=1)]
    at_once = max(1, ENTRIES_AT_ONCE // maps.shape[1])
    # each comparison in place, as 0 or 1: a table of booleans beside it would take twice the time
    kind = torch.promote_types(maps.dtype, torch.float32)
    count = sum(int((some @ maps).abs_().gt_(cutoff).sum(dtype=kind)) for some in pairs.split(at_once))
    share = count / (rows * tokens * maps.shape[1])
    return ShareEstimate(share, share, share)


def sampled_share(pairs: Tensor, entries: Tensor, cutoff: float, nonzero_share: float) -> ShareEstimate:
    """The share of entries with |w| > cutoff over all of W'.

    pairs: ĥ_ij of uniformly drawn nonzero blocks, (n, heads); entries: (n, heads), from `sample_entries`;
    nonzero_share: share of blocks that are nonzero. 95 % Wilson score interval.
    """
    hits = int(((pairs * entries).sum(dim=1).abs() > cutoff).sum())
    low, high = wilson_interval(hits, len(pairs))
    return ShareEstimate(hits / len(pairs) * nonzero_share, low * nonzero_share, high * nonzero_share)


def wilson_interval(hits: int, draws: int) -> tuple[float, float]:
    """The Wilson (1927) score interval of a binomial share, for 95 %."""
    z, p = Z_95, hits / draws
    centre = (p + z * z / (2 * draws)) / (1 + z * z / draws)
    half = z / (1 + z * z / draws) * (p * (1 - p) / draws + z * z / (4 * draws * draws)) ** 0.5
    low = 0.0 if hits == 0 else max(centre - half, 0.0)
    high = 1.0 if hits == draws else min(centre + half, 1.0)
    return low, high

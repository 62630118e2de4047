"""The share of entries of W' above a threshold: exact where W' is small, else from a uniform sample.

The sample pairs entries (a, b) of the head maps, drawn once per checkpoint, with token pairs (i, j) drawn for every
input from the nonzero blocks. Each entry Σ_h Ĥ_h[i, j] A_h[a, b] is then a uniform draw from those blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors

ENTRIES_AT_ONCE = 1 << 16  # as many as a processor's caches hold
PAIRS_AT_ONCE = 16  # blocks; a product over few heads is fast with this many columns
Z_95 = 1.959963984540054


@dataclass(frozen=True)
class ShareEstimate:
    """A share with its 95 % interval; low = share = high where it is exact."""

    share: float
    low: float
    high: float


def sample_entries(factors: HeadFactors, count: int, seed: int, first: int | None = None) -> Tensor:
    """`count` uniform draws (a, b), as the vectors (A_1[a, b] … A_h[a, b]): (count, heads).

    first: how many of these draws to compute; None: all.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes, device = (factors.width, factors.hidden_size), factors.value.device
    a, b = (torch.randint(size, (count,), generator=generator).to(device)[:first] for size in sizes)
    values = factors.value.transpose(0, 1)[a]  # (count, kv_heads, d); whole rows, as they lie in memory
    outputs = factors.output.permute(2, 0, 1)[b].unflatten(1, (len(factors.value), factors.groups))
    return (values[:, :, None] * outputs).sum(dim=-1).flatten(1)


def exact_share(left: Tensor, maps: Tensor, cutoff: float) -> ShareEstimate:
    """The share of entries of W' with |w| > cutoff ≥ 0, found by computing every entry of the nonzero blocks.

    left: all rows of Ĥ, or some, (heads, rows, N). maps: every A_h, (heads, width, M).
    """
    heads, rows, tokens = left.shape
    maps = maps.reshape(heads, -1)  # (heads, width M)
    pairs = left.flatten(1).T  # (rows N, heads)
    pairs = pairs[pairs.any(dim=1)]
    at_once = max(1 if maps.shape[1] > ENTRIES_AT_ONCE else PAIRS_AT_ONCE, ENTRIES_AT_ONCE // maps.shape[1])
    # compared in place, as 0 or 1: a separate boolean tensor would take twice the time
    kind = torch.promote_types(maps.dtype, torch.float32)
    count = sum(int(_entries(some, maps).abs_().gt_(cutoff).sum(dtype=kind)) for some in pairs.split(at_once))
    share = count / (rows * tokens * maps.shape[1])
    return ShareEstimate(share, share, share)


def _entries(pairs: Tensor, maps: Tensor) -> Tensor:
    """Every entry of some blocks, in any order. With few heads the transposed product is faster for enough blocks."""
    return maps.mT @ pairs.mT if len(pairs) >= PAIRS_AT_ONCE else pairs @ maps


def exact_multiples(sizes: Tensor, values: Tensor, blocks: int, cutoff: float) -> ShareEstimate:
    """The exact share where every block is a multiple of one matrix, by a search in its sorted entries.

    sizes: |factor| of the nonzero blocks, (n,). values: |entries| of the matrix, sorted. blocks: number of all blocks.
    """
    within = torch.searchsorted(values, (cutoff / sizes.double()).to(values.dtype), right=True)
    count = len(sizes) * len(values) - int(within.sum())
    share = count / (blocks * len(values))
    return ShareEstimate(share, share, share)


def sampled_shares(
    pairs: Tensor, entries: Tensor, cutoffs: Sequence[float], nonzero_shares: Sequence[float]
) -> list[ShareEstimate | None]:
    """The estimated share of entries with |w| > cutoff over all of W', for several W' with the same nonzero blocks,
    with 95 % Wilson score intervals; None where no block was drawn.

    pairs: ĥ_ij of uniformly drawn nonzero blocks, (W', n, heads). entries: at least n draws from `sample_entries`,
    (…, heads). nonzero_shares: share of blocks that are nonzero, for each W'.
    """
    draws, found = pairs.shape[-2], list[ShareEstimate | None]()
    if not draws:
        return [None] * len(pairs)
    limits = torch.tensor(cutoffs, dtype=pairs.dtype, device=pairs.device)[:, None]
    hits = ((pairs * entries[:draws]).sum(dim=-1).abs() > limits).sum(dim=-1).tolist()
    for count, nonzero in zip(hits, nonzero_shares, strict=True):
        low, high = wilson_interval(count, draws)
        found.append(ShareEstimate(count / draws * nonzero, low * nonzero, high * nonzero))
    return found


def wilson_interval(hits: int, draws: int) -> tuple[float, float]:
    """The 95 % Wilson (1927) score interval of a binomial share."""
    z, p = Z_95, hits / draws
    centre = (p + z * z / (2 * draws)) / (1 + z * z / draws)
    half = z / (1 + z * z / draws) * (p * (1 - p) / draws + z * z / (4 * draws * draws)) ** 0.5
    low = 0.0 if hits == 0 else max(centre - half, 0.0)
    high = 1.0 if hits == draws else min(centre + half, 1.0)
    return low, high

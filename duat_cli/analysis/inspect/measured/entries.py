"""How many entries of one block's W' exceed a threshold: counted where W' is small, otherwise sampled.

The same token pairs are drawn for every operator on equally many tokens, so that a value and its null share a sample.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

EXACT_ENTRIES = 1 << 22  # entries of W' that are counted one by one; above it they are sampled
PAIR_DRAWS = 2048
SEED = 13


class Pairs:
    """Uniformly drawn token pairs (i, j) with nonzero blocks, and the entries of the rows there; or for several W' with
    the same nonzero blocks, with a first axis for them."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: list[tuple[Tensor, Tensor]] = []  # (indices of draws, entries of the rows there)

    def add(self, rows: Tensor, alive: Tensor, start: int) -> None:
        """Adds some rows. rows: (k, n, columns) from row `start` on, without trailing zero columns; alive: which blocks
        of these are nonzero, (n, columns)."""
        count, width = rows.shape[-2:]
        i, j = draws(self._tokens, rows.device)
        here = _all_draws(rows.device)
        if count < self._tokens:
            here = ((i >= start) & (i < start + count) & (j < width)).nonzero()[:, 0]
        places = ((i - start) * width + j).index_select(0, here)
        reached = alive.flatten().index_select(0, places).nonzero()[:, 0]
        held = rows.flatten(-2).index_select(-1, places.index_select(0, reached)).mT
        self._found.append((here.index_select(0, reached), held))

    def vectors(self, most: int) -> Tensor:
        """Entries of the rows at the first `most` draws that hit nonzero blocks, in order of drawing, (n, k)."""
        if len(self._found) == 1:  # all rows were added at once, so in order already
            return self._found[0][1][..., :most, :]
        places = torch.cat([p for p, _ in self._found])
        vectors = torch.cat([v for _, v in self._found])
        return vectors[places.argsort()][:most]


@functools.lru_cache(maxsize=8)
def draws(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """PAIR_DRAWS token pairs as indices (i, j), the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    i, j = torch.randint(tokens, (2, PAIR_DRAWS), generator=generator).to(device)
    return i, j


@functools.cache
def _all_draws(device: torch.device) -> Tensor:
    return torch.arange(PAIR_DRAWS, device=device)


def are_counted(entries: int) -> bool:
    """Whether a W' with so many entries is small enough to count them all."""
    return entries <= EXACT_ENTRIES


def cutoff_of(inner: int, outer: int, norm: float, threshold: float) -> float:
    """The cutoff: threshold times rms(W') = ‖W'‖_F / (outer inner)^½, for W' with outer rows and inner columns."""
    return threshold * norm / (inner * outer) ** 0.5

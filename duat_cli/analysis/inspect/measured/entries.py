"""How many entries of one block's W' exceed a threshold: counted where W' is small, else sampled.

The same token pairs are drawn for every operator of as many tokens, so that a value and its null share their sample.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

EXACT_ENTRIES = 1 << 22  # entries of W' that are counted one by one; above it they are sampled
PAIR_DRAWS = 2048
SEED = 13


class Pairs:
    """Uniformly drawn token pairs (i, j), what rows hold there, and whether their block is zero; or those of several W'
    whose nonzero blocks are the same, with an axis in front of what the rows hold."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: list[tuple[Tensor, Tensor]] = []  # (draw indices, what the rows hold)

    def add(self, rows: Tensor, alive: Tensor, start: int) -> None:
        """rows: (k, n, columns) from row `start` on, without columns at the end that are zero; alive: which of their
        blocks are not zero, (n, columns)."""
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
        """What the rows hold at the first `most` draws that hit nonzero blocks, in order of drawing: (n, k)."""
        if len(self._found) == 1:  # all rows at once: in order already
            return self._found[0][1][..., :most, :]
        places = torch.cat([p for p, _ in self._found])
        vectors = torch.cat([v for _, v in self._found])
        return vectors[places.argsort()][:most]


@functools.lru_cache(maxsize=8)
def draws(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(i, j) of PAIR_DRAWS token pairs, the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    i, j = torch.randint(tokens, (2, PAIR_DRAWS), generator=generator).to(device)
    return i, j


@functools.cache
def _all_draws(device: torch.device) -> Tensor:
    return torch.arange(PAIR_DRAWS, device=device)


def are_counted(entries: int) -> bool:
    """Whether a W' of so many entries is so small that all of them are looked at."""
    return entries <= EXACT_ENTRIES


def cutoff_of(inner: int, outer: int, norm: float, threshold: float) -> float:
    """threshold times rms(W') = ‖W'‖_F / (outer inner)^½, W' of outer rows and inner columns."""
    return threshold * norm / (inner * outer) ** 0.5

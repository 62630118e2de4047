"""The parts of one block's W' that depend on the checkpoint alone: computed once, then read from the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from duat_cli.cache.tensors import TensorCache
from duat_cli.models.arrays import relative_error, rounding
from duat_cli.models.value_path.factors import BlockFactors
from duat_cli.operators.gated import ChannelGram
from duat_cli.operators.kronecker import HeadFactors, gram, gram_root, gram_row, told_apart
from duat_cli.operators.pattern import EntryPattern
from duat_cli.operators.sampling import sample_entries

ENTRY_SAMPLES = 2048
KEPT_HEADS = 512  # up to so many heads, G and R (8 heads² bytes each) are kept for every block, and G also on disk
KEPT_CHANNELS = 2048
KEPT_MAPS = 1 << 16  # up to so many entries, a block's head maps are kept
RECOMPUTED = 16  # sampled entries that are computed again to check what the cache holds
SEED = 11

Key = TypeVar("Key")


@dataclass(frozen=True)
class Geometry:
    """The Gram matrix of the head maps and a sample of their entries."""

    gram: Tensor  # G, (heads, heads), float64
    root: Tensor  # R with R R = G
    entries: Tensor  # (ENTRY_SAMPLES, heads); in memory head after head, like the entries of a W' at drawn pairs
    pattern: EntryPattern  # which entries of V O can be nonzero
    factors: HeadFactors
    cancels: bool  # whether a W' may be much smaller than its terms

    @classmethod
    def of(cls, factors: HeadFactors, gram: Tensor, entries: Tensor) -> Geometry:
        """The geometry with all that follows from these."""
        cancels = not told_apart(gram)
        return cls(gram, gram_root(gram), entries.T.contiguous().T, EntryPattern(factors), factors, cancels)

    @functools.cached_property
    def _channels(self) -> ChannelGram:
        return ChannelGram(self.factors)

    def channels(self) -> ChannelGram:
        """The Gram matrix of single channels, for gated attention; kept where it is small."""
        small = self.factors.heads * self.factors.output.shape[1] <= KEPT_CHANNELS
        return self._channels if small else ChannelGram(self.factors)

    @functools.cached_property
    def _maps(self) -> Tensor:
        return self.factors.maps()

    def maps(self) -> Tensor:
        """Every A_h, (heads, width, M), for small cases; kept where they are few."""
        return self._maps if self._few else self.factors.maps()

    @functools.cached_property
    def sorted_total(self) -> Tensor | None:
        """|entries| of the sum of every A_h, sorted; None where the maps are not kept."""
        return self._maps.sum(dim=0).abs().flatten().sort().values if self._few else None

    @property
    def _few(self) -> bool:
        return self.factors.heads * self.factors.width * self.factors.hidden_size <= KEPT_MAPS


def known_or(made: Callable[[], Geometry], key: Key, known: dict[Key, Geometry]) -> Geometry:
    """The geometry known for a key; if there is none, it is made and kept. Of those with many heads only the last one
    is kept."""
    if key not in known:
        for other in [one for one, found in known.items() if found.factors.heads > KEPT_HEADS]:
            del known[other]
        known[key] = made()
    return known[key]


def bare(factors: HeadFactors) -> Geometry:
    """The geometry for a W'_c, without a sample of entries and without the cache."""
    return Geometry.of(factors, gram(factors), entries=factors.output.new_zeros(0, factors.heads))


def geometry(factors: BlockFactors, name: str, cache: TensorCache) -> Geometry:
    """The geometry of a block's W', cached if its factors were read from weights. It is not cached for factors found
    with unit vectors, as their V has an arbitrary scale, nor for many heads."""
    kept = factors.origin == "read" and factors.heads.heads <= KEPT_HEADS
    stored, entries = (cache.get(name), cache.get(name + ".entries")) if kept else (None, None)
    if stored is None or entries is None or not _belongs(stored, entries, factors.heads):
        stored, entries = gram(factors.heads), sample_entries(factors.heads, ENTRY_SAMPLES, SEED)
        if kept:
            cache.put(name, stored)
            cache.put(name + ".entries", entries)
    device = factors.heads.value.device
    return Geometry.of(factors.heads, stored.to(device), entries.to(device))


def _belongs(stored: Tensor, entries: Tensor, heads: HeadFactors) -> bool:
    """Whether the cached tensors belong to these factors, by their shapes, one row of G and some entries."""
    if stored.shape != (heads.heads, heads.heads) or entries.shape != (ENTRY_SAMPLES, heads.heads):
        return False
    row, some = gram_row(heads, heads.heads // 2), sample_entries(heads, ENTRY_SAMPLES, SEED, first=RECOMPUTED)
    pairs = ((stored[heads.heads // 2], row), (entries[:RECOMPUTED], some))
    return all(relative_error(mine.to(anew), anew) <= rounding(heads.value.dtype) for mine, anew in pairs)

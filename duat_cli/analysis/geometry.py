"""What of one block's W' depends on the checkpoint alone: computed once, then read from the cache."""

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
KEPT_HEADS = 512  # up to here G and R, of 8 heads² bytes each, are kept of every block, and G on disk
KEPT_CHANNELS = 2048
KEPT_MAPS = 1 << 16  # entries of a block's
RECOMPUTED = 16  # of them, whenever they come from the cache
SEED = 11

Key = TypeVar("Key")


@dataclass(frozen=True)
class Geometry:
    """The Gram matrix of the head maps and a sample of their entries."""

    gram: Tensor  # G, (heads, heads), float64
    root: Tensor  # R with R R = G
    entries: Tensor  # (ENTRY_SAMPLES, heads); a head after the other in memory, as what a W' holds at drawn pairs
    pattern: EntryPattern  # which entries of V O can be nonzero
    factors: HeadFactors
    cancels: bool  # whether a W' may be much smaller than its terms

    @classmethod
    def of(cls, factors: HeadFactors, gram: Tensor, entries: Tensor) -> Geometry:
        """With what follows from these."""
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
        """Every A_h, (heads, width, M): for small cases; kept where they are small."""
        return self._maps if self._few else self.factors.maps()

    @functools.cached_property
    def sorted_total(self) -> Tensor | None:
        """|entries| of the sum of every A_h, sorted; None where the maps are not kept."""
        return self._maps.sum(dim=0).abs().flatten().sort().values if self._few else None

    @property
    def _few(self) -> bool:
        return self.factors.heads * self.factors.width * self.factors.hidden_size <= KEPT_MAPS


def known_or(made: Callable[[], Geometry], key: Key, known: dict[Key, Geometry]) -> Geometry:
    """What is known of that key, else made and from then on known; of those with many heads only the last one is."""
    if key not in known:
        for other in [one for one, found in known.items() if found.factors.heads > KEPT_HEADS]:
            del known[other]
        known[key] = made()
    return known[key]


def bare(factors: HeadFactors) -> Geometry:
    """Without a sample of entries, and past the cache: of W'_c."""
    return Geometry.of(factors, gram(factors), entries=factors.output.new_zeros(0, factors.heads))


def geometry(factors: BlockFactors, name: str, cache: TensorCache) -> Geometry:
    """From the cache where the factors were read from weights; found with unit vectors, V has an arbitrary
    scale and is not kept, nor is that of many heads."""
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
    """Whether what the cache holds is of these factors: shapes, one row of G and some entries computed anew."""
    if stored.shape != (heads.heads, heads.heads) or entries.shape != (ENTRY_SAMPLES, heads.heads):
        return False
    row, some = gram_row(heads, heads.heads // 2), sample_entries(heads, ENTRY_SAMPLES, SEED, first=RECOMPUTED)
    pairs = ((stored[heads.heads // 2], row), (entries[:RECOMPUTED], some))
    return all(relative_error(mine.to(anew), anew) <= rounding(heads.value.dtype) for mine, anew in pairs)

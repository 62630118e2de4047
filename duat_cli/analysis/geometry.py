"""What of one block's W' depends on the checkpoint alone: computed once, then read from the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from duat_cli.models.cache import TensorCache
from duat_cli.models.factors import BlockFactors
from duat_cli.operators.kronecker import gram, gram_root
from duat_cli.operators.pattern import EntryPattern
from duat_cli.operators.sampling import sample_entries

ENTRY_SAMPLES = 2048
SEED = 11


@dataclass(frozen=True)
class Geometry:
    """The Gram matrix of the head maps and a sample of their entries."""

    gram: Tensor  # G, (heads, heads), float64
    root: Tensor  # R with R R = G
    entries: Tensor  # (ENTRY_SAMPLES, heads)
    pattern: EntryPattern  # which entries of V O can be nonzero


def geometry(factors: BlockFactors, name: str, cache: TensorCache) -> Geometry:
    """From the cache where the factors were read from weights; a probed V has an arbitrary scale and is not kept."""
    stored = cache.get(name) if factors.origin == "read" else None
    entries = cache.get(name + ".entries") if stored is not None else None
    device = factors.heads.value.device
    if stored is None or entries is None:
        stored, entries = gram(factors.heads), sample_entries(factors.heads, ENTRY_SAMPLES, SEED)
        if factors.origin == "read":
            cache.put(name, stored)
            cache.put(name + ".entries", entries)
    stored = stored.to(device)
    return Geometry(stored, gram_root(stored), entries.to(device), EntryPattern(factors.heads))

"""An estimate of a sum over many items from some of them, drawn with unequal probabilities (Hansen & Hurwitz 1943).

Item k has probability p_k at each of n independent draws, and y_k / p_k estimates the sum of all y without bias. The
more nearly p_k is proportional to y_k, the less it varies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """Places of the drawn items, (n,), rising, and their weights 1 / (n p), (n,) float64. If there are few items, each
    is taken once, with weight 1."""

    places: Tensor
    weights: Tensor
    sampled: bool

    def total(self, values: Tensor) -> tuple[float, float]:
        """The estimate of the sum over all items, and of the estimate's variance. values: those of the drawn items,
        (n,)."""
        parts = values.double().cpu() * self.weights
        variance = len(parts) * float(parts.var()) if self.sampled else 0.0
        return float(parts.sum()), variance


def draw(sizes: Tensor, count: int, generator: torch.Generator) -> Drawn:
    """`count` draws, at least two, with probabilities proportional to `sizes` (items,), which are not negative.

    An item of size zero is never drawn, so its value must be zero.
    """
    sizes = sizes.double().cpu()
    places = sizes.nonzero()[:, 0]
    count = max(2, count)
    if len(places) <= count:
        return Drawn(places, torch.ones(len(places), dtype=torch.float64), sampled=False)
    shares = sizes[places] / sizes.sum()
    chosen = torch.multinomial(shares, count, replacement=True, generator=generator).sort().values
    return Drawn(places[chosen], 1 / (count * shares[chosen]), sampled=True)


def interval(estimate: float, variance: float, confidence: float) -> tuple[float, float]:
    """The normal interval of a sum of many independent draws; never below zero."""
    reach = float(torch.special.ndtri(torch.tensor((1 + confidence) / 2, dtype=torch.float64))) * variance**0.5
    return max(0.0, estimate - reach), estimate + reach

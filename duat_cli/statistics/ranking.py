"""How well one list of numbers orders another: rank correlations and ratios, with bootstrap intervals.

Items may have been drawn with unequal probabilities. Each then has a weight, 1 / its probability, and counts as that
many items.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
SEED = 17
CHUNK = 50  # resamples at once


Statistic = Callable[[Tensor, Tensor, Tensor], Tensor]  # function of x, y and the weights, along the last axis


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float


def largest(x: Tensor, count: int) -> list[int]:
    """Places of the largest values of x (n,), which has no NaN: the largest first, equal ones in their own order.

    torch.topk alone chooses arbitrarily among equal values, differently on different devices; sorting all values would
    be slower.
    """
    count = min(count, len(x))
    if not count:
        return []
    least = x.topk(count).values[-1]
    ahead = (x > least).nonzero()[:, 0]
    ahead = ahead[x[ahead].argsort(descending=True, stable=True)]
    return torch.cat([ahead, (x == least).nonzero()[: count - len(ahead), 0]]).tolist()


def ranks(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Ranks from 1 along the last axis; ties get their mean rank."""
    w = _ones(x) if weights is None else weights.double()
    ordered, places = x.double().sort(dim=-1)
    upto = torch.nn.functional.pad(w.gather(-1, places).cumsum(dim=-1), (1, 0))
    below = upto.gather(-1, torch.searchsorted(ordered, ordered, side="left"))
    above = upto.gather(-1, torch.searchsorted(ordered, ordered, side="right"))
    mean = (below + above + 1) / 2
    return torch.empty_like(mean).scatter_(-1, places, mean)


def spearman(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Spearman's rank correlation along the last axis; NaN where one side is constant."""
    w = _ones(x) if weights is None else weights.double()
    both = [ranks(v, w) for v in (x, y)]
    a, b = (r - (w * r).sum(dim=-1, keepdim=True) / w.sum(dim=-1, keepdim=True) for r in both)
    found = (w * a * b).sum(dim=-1) / ((w * a.square()).sum(dim=-1) * (w * b.square()).sum(dim=-1)).sqrt()
    return found.clamp(-1.0, 1.0)  # rounding may exceed the range


def kendall(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Kendall's τ-b along the last axis; NaN where one side is constant."""
    w = _ones(x) if weights is None else weights.double()
    pair = w[..., :, None] * w[..., None, :]
    a, b = (torch.sign(v[..., :, None] - v[..., None, :]) for v in (x.double(), y.double()))
    x_pairs, y_pairs = ((pair * v.square()).sum(dim=(-1, -2)) for v in (a, b))
    return ((pair * a * b).sum(dim=(-1, -2)) / (x_pairs * y_pairs).sqrt()).clamp(-1.0, 1.0)


def median_ratio(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Median of x / y along the last axis; if two ratios share the middle, their mean."""
    w = _ones(x) if weights is None else weights.double()
    ratio, places = (x / y).sort(dim=-1)  # NaN last
    w = w.gather(-1, places) * ratio.isfinite()
    upto = w.cumsum(dim=-1)
    half = upto[..., -1:] / 2
    slack = 1e-12 * half
    lower = torch.searchsorted(upto, half - slack, side="left")
    upper = torch.searchsorted(upto, half + slack, side="right").clamp_max(x.shape[-1] - 1)
    return (ratio.gather(-1, lower) + ratio.gather(-1, upper))[..., 0] / 2


def worst_ratio(x: Tensor, y: Tensor) -> Tensor:
    """The ratio x / y, both above zero, that is farthest from one, as a factor of at least one."""
    return (x / y).log().abs().amax(dim=-1).exp()


def bootstrap(
    statistic: Statistic, x: Tensor, y: Tensor, confidence: float, weights: Tensor | None = None
) -> Estimate | None:
    """The statistic of (x, y), both (n,), with the percentile interval over the items (Efron 1979); None where it is
    undefined."""
    w = _ones(x) if weights is None else weights.double()
    value = float(statistic(x.double(), y.double(), w))
    if not math.isfinite(value):
        return None
    generator = torch.Generator().manual_seed(SEED)
    picks = torch.randint(len(x), (RESAMPLES, len(x)), generator=generator)
    found = torch.cat([statistic(x.double()[p], y.double()[p], w[p]) for p in picks.split(CHUNK)])
    found = found[found.isfinite()]
    if not len(found):
        return None
    tail = (1 - confidence) / 2
    low, high = torch.quantile(found, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, min(low, value), max(high, value))


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.float64)

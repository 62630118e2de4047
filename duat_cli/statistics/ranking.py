"""How well one list of numbers orders another: rank correlations and ratios, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
SEED = 17


@dataclass(frozen=True)
class Estimate:
    """A value with the percentile bootstrap interval over the items (Efron 1979)."""

    value: float
    low: float
    high: float


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1 along the last axis; ties get their mean rank."""
    ordered, places = x.double().sort(dim=-1)
    counts = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64).expand(x.shape)
    below = torch.searchsorted(ordered, ordered, side="left").double()
    above = torch.searchsorted(ordered, ordered, side="right").double()
    mean = (below + above + 1) / 2
    return torch.empty_like(counts).scatter_(-1, places, mean)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rank correlation along the last axis; NaN where one side is constant."""
    a, b = (r - r.mean(dim=-1, keepdim=True) for r in (ranks(x), ranks(y)))
    return (a * b).sum(dim=-1) / (a.square().sum(dim=-1) * b.square().sum(dim=-1)).sqrt()


def kendall(x: Tensor, y: Tensor) -> Tensor:
    """Kendall's τ-b along the last axis; NaN where one side is constant."""
    a, b = (torch.sign(v[..., :, None] - v[..., None, :]) for v in (x.double(), y.double()))
    return (a * b).sum(dim=(-1, -2)) / (a.square().sum(dim=(-1, -2)) * b.square().sum(dim=(-1, -2))).sqrt()


def median_ratio(x: Tensor, y: Tensor) -> Tensor:
    """Median of x / y along the last axis: of an even number of ratios the mean of the two in the middle."""
    ratio = x / y
    lower, upper = ratio.nanmedian(dim=-1).values, -(-ratio).nanmedian(dim=-1).values
    return (lower + upper) / 2


def worst_ratio(x: Tensor, y: Tensor) -> Tensor:
    """The ratio x / y farthest from one, as a factor of at least one."""
    logs = (x / y).log().abs()
    return torch.where(logs.isnan(), -1.0, logs).amax(dim=-1).exp()


def bootstrap(
    statistic: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, confidence: float, chunk: int = 50
) -> Estimate | None:
    """The statistic of (x, y), both (n,), with its interval; None where it is undefined."""
    value = float(statistic(x.double(), y.double()))
    if not math.isfinite(value):
        return None
    generator = torch.Generator().manual_seed(SEED)
    picks = torch.randint(len(x), (RESAMPLES, len(x)), generator=generator)
    found = torch.cat([statistic(x.double()[p], y.double()[p]) for p in picks.split(chunk)])
    found = found[found.isfinite()]
    if not len(found):
        return None
    tail = (1 - confidence) / 2
    low, high = torch.quantile(found, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, min(low, value), max(high, value))

"""Exact intervals for a length measured with Gaussian probes.

For v ~ N(0, I) the response v·y is N(0, |y|²), so Σ_k r_k² / |y|² is χ² with K degrees of freedom: the estimate of |y|
and its interval need no approximation. A mean over several independent lengths gets the degrees of freedom that match
its variance (Satterthwaite 1946); for one length that is exact again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def quantile(share: float, degrees: Tensor) -> Tensor:
    """The value that a χ² variable with so many degrees of freedom stays below with probability `share`."""
    half = degrees.double() / 2
    low, high = torch.zeros_like(half), half + 40 * half.sqrt() + 80
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle) < share
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + high


def root_mean(probes: int) -> float:
    """E[χ_K] / √K: the factor by which the root of a mean of K squared responses falls short of the length, on
    average."""
    return math.sqrt(2 / probes) * math.exp(math.lgamma((probes + 1) / 2) - math.lgamma(probes / 2))


def mean_length(squares: Tensor, confidence: float) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate, low and high of the mean over prompts of |y|. squares: (prompts, probes, …) of squared responses."""
    probes = squares.shape[1]
    lengths = squares.double().mean(dim=1).sqrt() / root_mean(probes)
    estimate = lengths.mean(dim=0)
    # relative variance of a root of χ²_K/K, and of the mean of such
    spread = (1 / root_mean(probes) ** 2 - 1) * lengths.square().sum(dim=0) / len(squares) ** 2
    degrees = _degrees_of_root(spread / estimate.square().clamp_min(1e-300))
    scale = _root_mean(degrees)
    low, high = _ends(degrees, confidence)
    return estimate, estimate * scale * (degrees / high).sqrt(), estimate * scale * (degrees / low).sqrt()


def mean_square(squares: Tensor, confidence: float) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate, low and high of the mean over prompts of |y|². squares: (prompts, probes, …) of squared responses."""
    probes = squares.shape[1]
    each = squares.double().mean(dim=1)
    estimate = each.mean(dim=0)
    spread = 2 / probes * each.square().sum(dim=0) / len(squares) ** 2
    degrees = 2 * estimate.square() / spread.clamp_min(1e-300)
    degrees = torch.where(estimate > 0, degrees, float(probes)).clamp_min(1e-3)
    low, high = _ends(degrees, confidence)
    return estimate, estimate * degrees / high, estimate * degrees / low


def _ends(degrees: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    return quantile((1 - confidence) / 2, degrees), quantile((1 + confidence) / 2, degrees)


def _root_mean(degrees: Tensor) -> Tensor:
    return (2 / degrees).sqrt() * torch.exp(torch.lgamma((degrees + 1) / 2) - torch.lgamma(degrees / 2))


def _degrees_of_root(relative_variance: Tensor) -> Tensor:
    """The degrees of freedom ν at which the root of χ²_ν/ν has this relative variance: 1/c(ν)² - 1."""
    low = torch.full_like(relative_variance, 1e-3)
    high = torch.full_like(relative_variance, 1e9)
    for _ in range(100):
        middle = (low * high).sqrt()
        wider = 1 / _root_mean(middle).square() - 1 > relative_variance
        low, high = torch.where(wider, middle, low), torch.where(wider, high, middle)
    return (low * high).sqrt()

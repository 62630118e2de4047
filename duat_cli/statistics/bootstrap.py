"""An interval for the mean of a few paired differences."""

from __future__ import annotations

import torch

from duat_cli.statistics.ranking import Estimate

RESAMPLES = 4000
SEED = 23
FEWEST = 5  # differences; fewer do not show their spread
LEAST = 0.01  # fraction of the sample's spread; a resample below it does not show how far its mean may be off


def paired_interval(differences: list[float], confidence: float = 0.95) -> Estimate | None:
    """The studentised bootstrap interval (Efron & Tibshirani 1993, section 12.5) of the mean difference.

    Differences are drawn anew with replacement, one for each pair. The percentile interval would be too narrow for a
    dozen pairs. None for fewer than `FEWEST`, for equal differences, and where so many differences are nearly equal
    that resamples without any spread reach into the interval, which then has no end.
    """
    x = torch.tensor(differences, dtype=torch.float64)
    if len(x) < FEWEST or bool((x == x[0]).all()):
        return None
    mean, error = float(x.mean()), float(x.std()) / len(x) ** 0.5
    draws = torch.randint(len(x), (RESAMPLES, len(x)), generator=torch.Generator().manual_seed(SEED))
    drawn = x[draws]
    spread = drawn.std(dim=1) / len(x) ** 0.5
    t = ((drawn.mean(dim=1) - mean) / spread.where(spread > LEAST * error, 0.0)).nan_to_num(0.0, torch.inf, -torch.inf)
    ends = torch.quantile(t, torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=t.dtype))
    if not bool(torch.isfinite(ends).all()):
        return None
    low, high = ends.tolist()
    return Estimate(mean, mean - high * error, mean - low * error)

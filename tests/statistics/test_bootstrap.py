"""The bootstrap interval covers the mean as often as it says."""

from __future__ import annotations

import math

import pytest
import torch

from duat_cli.statistics.bootstrap import FEWEST, paired_interval


@pytest.mark.parametrize("skewed", [False, True])
def test_coverage_by_simulation(skewed: bool) -> None:
    """Of 400 samples of 15; the percentile interval of the same samples covers less."""
    generator = torch.Generator().manual_seed(3)
    covered = percentile = 0
    for _ in range(400):
        x = torch.randn(15, generator=generator, dtype=torch.float64)
        x, true = (x.exp(), math.exp(0.5)) if skewed else (x, 0.0)
        found = paired_interval(x.tolist())
        assert found is not None
        covered += found.low <= true <= found.high
        means = x[torch.randint(15, (400, 15), generator=generator)].mean(dim=1)
        low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        percentile += low <= true <= high
    assert covered / 400 >= (0.87 if skewed else 0.925)
    assert covered > percentile


def test_shift_and_scale_go_through() -> None:
    x = [0.3, -0.1, 0.9, 0.4, 0.2, 0.6]
    one, two = paired_interval(x), paired_interval([2 * value + 5 for value in x])
    assert one is not None
    assert two is not None
    assert one.low < one.value < one.high
    assert (two.low, two.high) == pytest.approx((2 * one.low + 5, 2 * one.high + 5))


def test_equal_differences_and_too_few() -> None:
    assert paired_interval([0.25] * (2 * FEWEST)) is None
    assert paired_interval([0.1] * (FEWEST - 1)) is None


@pytest.mark.parametrize("almost", [0.0, 1e-6, 1e-3])
def test_resamples_without_spread_leave_no_end(almost: float) -> None:
    """A third of the resamples of such a sample hold nothing but its equal values: the mean may be anywhere above."""
    assert paired_interval([0.0, almost, -almost, 0.0, 1.0]) is None
    assert paired_interval([-2.0, -1.0, 0.0, 1.0, 2.0]) is not None  # some hold the mean alone

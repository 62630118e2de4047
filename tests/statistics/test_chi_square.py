"""Quantiles against known values; intervals by simulation: they hold the truth as often as they say."""

from __future__ import annotations

import math

import pytest
import torch

from duat_cli.statistics.chi_square import mean_length, mean_square, quantile, root_mean


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [(0.95, 1, 3.841459), (0.95, 10, 18.307038), (0.025, 32, 18.290765), (0.975, 32, 49.480438), (0.5, 2, 1.386294)],
)
def test_quantiles_are_the_tabulated_ones(share: float, degrees: int, expected: float) -> None:
    assert float(quantile(share, torch.tensor([float(degrees)]))) == pytest.approx(expected, abs=1e-5)


def test_root_mean_is_the_mean_of_the_chi_distribution() -> None:
    assert root_mean(1) == pytest.approx(math.sqrt(2 / math.pi))
    assert root_mean(2) == pytest.approx(math.sqrt(math.pi) / 2)
    assert root_mean(10**6) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("prompts", [1, 5])
@pytest.mark.parametrize("probes", [4, 32])
@pytest.mark.parametrize("estimator", [mean_length, mean_square])
def test_intervals_hold_the_truth_as_often_as_they_say(estimator, probes: int, prompts: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(prompts * 100 + probes)
    lengths = torch.linspace(1, 3, prompts, dtype=torch.float64)
    trials = 5_000 if probes * prompts > 100 else 20_000  # a trial of many values tells as much as several of few
    responses = torch.randn(prompts, probes, trials, dtype=torch.float64) * lengths[:, None, None]
    truth = float(lengths.mean() if estimator is mean_length else lengths.square().mean())
    estimate, low, high = estimator(responses.square(), 0.95)
    assert float(estimate.mean()) == pytest.approx(truth, rel=0.01), "unbiased"
    covered = float(((low <= truth) & (truth <= high)).double().mean())
    # exact for one prompt; matched variance, and so nearly exact, for several
    assert covered == pytest.approx(0.95, abs=0.006 if prompts == 1 else 0.02)


def test_a_term_without_effect_has_an_interval_of_zero() -> None:
    for estimator in (mean_length, mean_square):
        assert [float(v) for v in estimator(torch.zeros(3, 8, 1), 0.95)] == [0.0, 0.0, 0.0]

"""The mean over many items of which few are measured: without a bias that shows, and its interval covers as often as it
says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from duat_cli.statistics import survey
from duat_cli.statistics.survey import FEWEST, chances, draw, mean_of, quantile

ROUNDS = 400


def population(items: int, bias: float, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Heavy-tailed damages, largest a thousand times the median, and predictions that are off by random factors."""
    generator = torch.Generator().manual_seed(seed)
    truth = (2.0 * torch.randn(items, generator=generator, dtype=torch.float64)).exp() / 1000
    off = (noise * torch.randn(items, generator=generator, dtype=torch.float64)).exp()
    return truth * bias * off, truth


def repeated(prediction: Tensor, truth: Tensor, count: int, confidence: float) -> tuple[Tensor, float, float]:
    """Estimates, the share of intervals that hold the truth, and their mean half width."""
    chance, generator = chances(prediction, count), torch.Generator().manual_seed(5)
    values, covered, width = [], 0, 0.0
    for _ in range(ROUNDS):
        drawn = torch.tensor(draw(chance, generator))
        found = mean_of(prediction, drawn, chance[drawn], truth[drawn], confidence)
        assert found is not None
        values.append(found.value)
        covered += found.low <= float(truth.mean()) <= found.high
        width += (found.high - found.low) / 2 / ROUNDS
    return torch.tensor(values, dtype=torch.float64), covered / ROUNDS, width


@pytest.mark.parametrize(
    ("bias", "noise", "count", "confidence"),
    [(1.0, 0.1, 24, 0.95), (0.7, 0.3, 24, 0.95), (2.0, 0.5, 24, 0.8), (0.7, 0.3, 12, 0.95), (1.0, 1.0, 24, 0.95)],
)
def test_the_interval_covers_the_truth(
    bias: float, noise: float, count: int, confidence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "RESAMPLES", 400)
    prediction, truth = population(2000, bias, noise, 3)
    values, covered, width = repeated(prediction, truth, count, confidence)
    assert abs(float(values.mean() - truth.mean())) <= 4 * float(values.std()) / ROUNDS**0.5, "unbiased"
    assert covered >= confidence - 0.035
    if noise < 1:  # of as many items drawn alike, without the prediction
        plain = float(truth.std()) / count**0.5 * quantile((1 + confidence) / 2, count - 1)
        assert width < plain / 3


def test_a_prediction_that_is_worth_nothing_leaves_it_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "RESAMPLES", 2)
    prediction, truth = population(500, 1.0, 0.1, 7)
    values, _, _ = repeated(prediction.flip(0), truth, 24, 0.9)
    assert abs(float(values.mean() - truth.mean())) <= 4 * float(values.std()) / ROUNDS**0.5
    assert abs(float(prediction.flip(0)[:24].mean() - truth.mean())) > 4 * float(values.std()) / ROUNDS**0.5


def test_a_prediction_far_too_large_does_not_bring_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a linearisation at massive activations is off by a hundred and more: the error is of the truth's size,
    and damages that are all above zero have no mean below it."""
    monkeypatch.setattr(survey, "RESAMPLES", 400)
    prediction, truth = population(1000, 300.0, 1.0, 3)
    values, covered, width = repeated(prediction, truth, 16, 0.95)
    assert float(values.min()) > 0
    assert float(values.std()) < 0.5 * float(truth.mean())
    assert covered >= 0.915
    assert width < 1.5 * float(truth.mean())


def test_each_item_is_drawn_with_its_chance() -> None:
    prediction, _ = population(40, 1.0, 0.1, 2)
    chance, generator = chances(prediction, 12), torch.Generator().manual_seed(1)
    assert float(chance.sum()) == pytest.approx(12)
    assert bool((chance == 1).any())
    assert float(chance.min()) > 12 / 40 / 4
    seen = torch.zeros(40, dtype=torch.float64)
    for _ in range(5 * ROUNDS):
        drawn = draw(chance, generator)
        assert len(drawn) == len(set(drawn)) == 12
        seen[drawn] += 1
    off = (seen / (5 * ROUNDS) - chance).abs()
    assert bool((off <= 4.5 * (chance * (1 - chance) / (5 * ROUNDS)).sqrt() + 1e-12).all())


def test_all_items_leave_nothing_to_estimate() -> None:
    prediction, truth = population(9, 3.0, 0.5, 4)
    chance = chances(prediction, 9)
    drawn = torch.tensor(draw(chance, torch.Generator()))
    found = mean_of(prediction, drawn, chance, truth, 0.95)
    assert found is not None
    assert drawn.tolist() == list(range(9))
    assert (found.low, found.value, found.high) == pytest.approx([float(truth.mean())] * 3)


def test_few_say_nothing() -> None:
    prediction, truth = population(90, 1.0, 0.1, 4)
    for count in (0, FEWEST - 1):
        chance = chances(prediction, count)
        drawn = torch.tensor(draw(chance, torch.Generator().manual_seed(0)), dtype=torch.long)
        assert len(drawn) == count
        assert mean_of(prediction, drawn, chance[drawn], truth[drawn], 0.95) is None


def test_no_prediction_at_all_draws_alike() -> None:
    assert chances(torch.zeros(8), 2).tolist() == [0.25] * 8
    assert chances(torch.tensor([math.nan, 0.0, math.inf, 0.0]), 2).tolist() == [0.5] * 4


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 23, 24, 199])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.975, 0.9995])
def test_students_quantile(share: float, degrees: int) -> None:
    """Against the density, integrated."""
    t = quantile(share, degrees)
    x = torch.linspace(0, t, 200_001, dtype=torch.float64)
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = math.exp(constant) * (1 + x.square() / degrees) ** (-(degrees + 1) / 2)
    assert float(torch.trapezoid(density, x)) + 0.5 == pytest.approx(share, abs=1e-6)

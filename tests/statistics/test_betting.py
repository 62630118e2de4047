"""Betting on a mean: the error is at most what is said, whatever the values are; and small means are shown."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.errors import InputError
from duat_cli.statistics.betting import mean_is_below

ROUNDS, PROMPTS, CONFIDENCE = 3000, 83, 0.95


def drawn(kind: str, mean: float, generator: torch.Generator) -> list[float]:
    """Values in [0, 1] of that mean."""
    uniform = torch.rand(PROMPTS, generator=generator, dtype=torch.float64)
    if kind == "all or nothing":
        return (uniform < mean).double().tolist()
    if kind == "rare and large":
        return torch.where(uniform < 0.05, 1.0, (mean - 0.05) / 0.95).tolist()
    return (2 * mean * uniform).tolist()


@pytest.mark.parametrize("kind", ["all or nothing", "rare and large", "even"])
def test_a_mean_at_the_limit_is_rarely_shown_to_be_below(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    wrong = sum(mean_is_below(drawn(kind, 0.2, generator), 0.2, 1.0, CONFIDENCE) for _ in range(ROUNDS))
    margin = 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / ROUNDS)
    assert wrong / ROUNDS <= 1 - CONFIDENCE + margin


@pytest.mark.parametrize(("kind", "mean"), [("all or nothing", 0.06), ("rare and large", 0.1), ("even", 0.14)])
def test_a_small_mean_is_shown_most_of_the_time(kind: str, mean: float) -> None:
    generator = torch.Generator().manual_seed(8)
    shown = sum(mean_is_below(drawn(kind, mean, generator), 0.2, 1.0, CONFIDENCE) for _ in range(300))
    assert shown > 200


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.floats(0.01, 0.99))
def test_a_mean_above_the_limit_in_the_sample_is_never_shown(values: list[float], confidence: float) -> None:
    if mean_is_below(values, 1.0, 5.0, confidence):
        assert math.fsum(min(v, 5.0) for v in values) <= len(values) * (1 + 1e-12)
        assert values


@given(st.lists(st.floats(-3, 5), min_size=1, max_size=60), st.floats(0.5, 0.99), st.floats(1e-6, 1e6))
def test_the_unit_does_not_matter(values: list[float], confidence: float, unit: float) -> None:
    scaled = [unit * value for value in values]
    wealth_is_clear = mean_is_below(values, 0.999, 5.0, confidence) == mean_is_below(values, 1.001, 5.0, confidence)
    if wealth_is_clear:  # not decided by rounding
        assert mean_is_below(scaled, unit, 5.0 * unit, confidence) == mean_is_below(values, 1.0, 5.0, confidence)


def test_few_values_show_nothing() -> None:
    assert not mean_is_below([], 1.0, 5.0, 0.95)
    assert not mean_is_below([0.0] * 4, 1.0, 5.0, 0.95)
    assert mean_is_below([0.0] * 40, 1.0, 5.0, 0.95)


@pytest.mark.parametrize(("limit", "most", "confidence"), [(0.0, 1.0, 0.9), (1.0, 1.0, 0.9), (0.5, 1.0, 1.0)])
def test_what_means_nothing_is_refused(limit: float, most: float, confidence: float) -> None:
    with pytest.raises(InputError, match="0 < limit < most"):
        mean_is_below([0.1], limit, most, confidence)

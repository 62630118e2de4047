"""Sums from drawn items: by enumeration, and coverage by simulation."""

from __future__ import annotations

import itertools

import pytest
import torch

from duat_cli.statistics.drawn import Drawn, draw, interval

SIZES = torch.tensor([0.2, 0.0, 1.0, 0.5], dtype=torch.float64)
VALUES = torch.tensor([0.3, 0.0, 0.9, 0.7], dtype=torch.float64)


def test_few_items_are_all_taken_once() -> None:
    drawn = draw(SIZES, 3, torch.Generator().manual_seed(0))
    assert drawn.places.tolist() == [0, 2, 3]
    assert drawn.total(VALUES[drawn.places]) == (pytest.approx(1.9), 0.0)


def test_over_all_draws_it_is_the_sum() -> None:
    """Every pair of draws, each with its probability: expectation of the estimate and of its variance."""
    places, shares = [0, 2, 3], (SIZES / SIZES.sum()).double()
    mean = square = said = 0.0
    for pair in itertools.product(places, repeat=2):
        index = torch.tensor(pair)
        one = Drawn(index, 1 / (2 * shares[index]), sampled=True)
        probability = float(shares[index].prod())
        total, variance = one.total(VALUES[index])
        mean, square, said = mean + probability * total, square + probability * total**2, said + probability * variance
    assert mean == pytest.approx(float(VALUES.sum()))
    assert said == pytest.approx(square - mean**2)


def test_the_interval_covers() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = torch.rand(300, generator=generator) + 0.05
    values = sizes * (0.7 + 0.6 * torch.rand(300, generator=generator))
    inside = 0
    for _ in range(400):
        drawn = draw(sizes, 40, generator)
        assert drawn.sampled
        assert len(drawn.places) == 40
        low, high = interval(*drawn.total(values[drawn.places]), 0.9)
        inside += low <= float(values.sum()) <= high
    assert 0.85 * 400 <= inside <= 0.95 * 400


def test_an_exact_sum_has_no_width() -> None:
    assert interval(2.0, 0.0, 0.95) == (2.0, 2.0)

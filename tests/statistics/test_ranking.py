"""Rank correlations against their definitions, with ties; the bootstrap by its coverage of a known case."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.statistics import ranking
from duat_cli.statistics.ranking import bootstrap, kendall, largest, median_ratio, ranks, spearman, worst_ratio

numbers = st.lists(st.integers(-5, 5), min_size=3, max_size=12)


def naive_ranks(x: list[int]) -> list[float]:
    return [sum(v < u for v in x) + (sum(v == u for v in x) + 1) / 2 for u in x]


@given(st.lists(st.integers(-3, 3), max_size=60), st.integers(0, 70))
def test_the_largest_come_first_and_equal_ones_in_their_own_order(x: list[int], count: int) -> None:
    expected = sorted(range(len(x)), key=lambda place: -x[place])[:count]
    assert largest(torch.tensor(x, dtype=torch.float64), count) == expected


@given(numbers)
def test_ranks_of_ties_are_their_mean(x: list[int]) -> None:
    assert ranks(torch.tensor(x)).tolist() == naive_ranks(x)


@given(st.integers(2, 40), st.integers(0, 200))
def test_no_correlation_is_larger_than_one(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(count, generator=generator), 1 + 9 * torch.rand(count, generator=generator)
    for statistic in (spearman, kendall):
        assert 1 - 1e-12 <= float(statistic(x, x, w)) <= 1
        assert -1 <= float(statistic(x, -x, w)) <= 1e-12 - 1


@given(numbers, st.randoms())
def test_correlations_are_their_definitions(x: list[int], random) -> None:  # type: ignore[no-untyped-def]
    y = [v + random.randint(-3, 3) for v in x]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert torch.isnan(spearman(torch.tensor(x), torch.tensor(y)))
        assert torch.isnan(kendall(torch.tensor(x), torch.tensor(y)))
        return
    a, b = torch.tensor(naive_ranks(x)), torch.tensor(naive_ranks(y))
    expected = torch.corrcoef(torch.stack([a, b]).double())[0, 1]
    assert float(spearman(torch.tensor(x), torch.tensor(y))) == pytest.approx(float(expected), abs=1e-9)
    pairs = list(itertools.combinations(range(len(x)), 2))

    def sign(v: int) -> int:
        return (v > 0) - (v < 0)

    agree = sum(sign(x[i] - x[j]) * sign(y[i] - y[j]) for i, j in pairs)
    size = (sum(x[i] != x[j] for i, j in pairs) * sum(y[i] != y[j] for i, j in pairs)) ** 0.5
    assert float(kendall(torch.tensor(x), torch.tensor(y))) == pytest.approx(agree / size, abs=1e-9)


def test_ratios() -> None:
    x, y = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 3.0])
    assert float(median_ratio(x, y)) == 2.0
    assert float(worst_ratio(x, y)) == pytest.approx(3.0)
    assert float(worst_ratio(y, x)) == pytest.approx(3.0), "too small by a factor is as bad as too large"


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_the_median_of_an_even_number_lies_between_the_middle_two(x: list[float]) -> None:
    ones = torch.ones(3, len(x), dtype=torch.float64)
    found = median_ratio(torch.tensor(x, dtype=torch.float64) * ones, ones)
    assert found.tolist() == pytest.approx([statistics.median(x)] * 3)


def test_the_bootstrap_of_an_even_number_is_of_its_median() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = bootstrap(median_ratio, x, torch.ones(4), 0.5)
    assert found is not None
    generator = torch.Generator().manual_seed(ranking.SEED)
    picks = torch.randint(4, (ranking.RESAMPLES, 4), generator=generator)
    drawn = sorted(statistics.median(x[row].tolist()) for row in picks)
    assert found.value == 3.0
    assert [found.low, found.high] == pytest.approx(
        [statistics.quantiles(drawn, n=4, method="inclusive")[k] for k in (0, 2)]
    )


def test_the_bootstrap_interval_narrows_around_the_truth() -> None:
    torch.manual_seed(0)
    x = torch.randn(400)
    noisy = x + 0.5 * torch.randn(400)
    few, many = bootstrap(spearman, x[:30], noisy[:30], 0.95), bootstrap(spearman, x, noisy, 0.95)
    assert few is not None
    assert many is not None
    assert many.low < 0.88 < many.high, "the correlation of normals at 1/sqrt(1.25)"
    assert many.high - many.low < (few.high - few.low) / 2
    assert bootstrap(spearman, torch.ones(5), x[:5], 0.95) is None

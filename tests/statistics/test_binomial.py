"""Clopper-Pearson limits against exact fractions, and the coverage of the printed statement by simulation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.statistics.binomial import allowed, choose_nested, log_tail, prompts_needed


def exact_tail(k: int, n: int, share: Fraction) -> Fraction:
    a, b = share.numerator, share.denominator
    return Fraction(sum(math.comb(n, i) * a**i * (b - a) ** (n - i) for i in range(k + 1)), b**n)


# From tables of one-sided limits (beta quantiles).
KNOWN = [(0, 10, 0.95, 0.2588656), (1, 10, 0.95, 0.3941633), (2, 20, 0.95, 0.2826185), (0, 59, 0.95, 0.0495096),
         (5, 50, 0.975, 0.2181354)]  # fmt: skip


@pytest.mark.parametrize(("k", "n", "confidence", "expected"), KNOWN)
def test_known_limits(k: int, n: int, confidence: float, expected: float) -> None:
    assert allowed(n, expected + 2e-6, confidence) == k
    assert allowed(n, expected - 2e-6, confidence) == (k - 1 if k else None)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))), st.floats(0.01, 0.9))
def test_the_tail_is_the_exact_one(case: tuple[int, int], share: float) -> None:
    k, n = case
    assert log_tail(k, n, share) == pytest.approx(math.log(exact_tail(k, n, Fraction(share))), rel=1e-9, abs=1e-12)


@given(st.integers(1, 150), st.floats(0.01, 0.9), st.floats(0.5, 0.999))
def test_allowed_is_the_last_count_whose_exact_tail_is_small_enough(n: int, share: float, confidence: float) -> None:
    most, level = allowed(n, share, confidence), 1 - confidence
    if most is None:
        assert n < prompts_needed(share, confidence)
    else:
        assert n >= prompts_needed(share, confidence)
        assert exact_tail(most, n, Fraction(share)) <= level * (1 + 1e-9)
    assert exact_tail(0 if most is None else most + 1, n, Fraction(share)) > level * (1 - 1e-9)


def test_prompts_needed() -> None:
    assert prompts_needed(0.05, 0.95) == 59
    assert prompts_needed(0.1, 0.95) == 29
    assert prompts_needed(0.1, 0.9) == 22
    assert prompts_needed(0.5, 0.5) == 1


def test_large_counts_do_not_underflow() -> None:
    few, many = (allowed(100_000, share, 0.95) for share in (0.001, 0.0013))
    assert few is not None
    assert many is not None
    assert few < 100 <= many
    assert log_tail(0, 100_000, 0.5) == pytest.approx(100_000 * math.log(0.5))


def test_the_test_stops_at_the_first_failure() -> None:
    assert allowed(60, 0.1, 0.95) == 1
    assert choose_nested([0, 1, 5, 0], 60, 0.1, 0.95) == 1
    assert choose_nested([3], 60, 0.1, 0.95) is None
    assert choose_nested([0, 0], 60, 0.1, 0.95) == 1


def test_bad_input_is_one_line() -> None:
    with pytest.raises(InputError, match="it takes 29 or more"):
        choose_nested([0], 28, 0.1, 0.95)
    for share, confidence in ((0.0, 0.95), (1.0, 0.95), (0.1, 0.0), (0.1, 1.0), (math.nan, 0.95)):
        with pytest.raises(InputError, match="between 0 and 1"):
            prompts_needed(share, confidence)


# -- coverage ------------------------------------------------------------------------------------------------

SHARE, CONFIDENCE, BUDGET, PROMPTS, SPLITS = 0.1, 0.9, 1.0, 40, 4000


def population(rise: float, seed: int) -> Tensor:
    """Damage of 12 nested sets on 2,000 prompts, (sets, prompts): heavy-tailed, rising with the set."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randn(2000, generator=generator)
    noise = 0.4 * torch.randn(12, 2000, generator=generator)
    return torch.exp(prompts + noise + rise * torch.arange(12)[:, None] - 2.0)


def false_statements(damage: Tensor, choose: object) -> float:
    """How often the printed statement is false, over random held-out prompts."""
    generator = torch.Generator().manual_seed(1)
    above = damage > BUDGET
    truth = above.double().mean(dim=1)
    held_out = torch.randint(damage.shape[1], (SPLITS, PROMPTS), generator=generator)
    chosen = [choose(counts) for counts in above[:, held_out].sum(dim=2).T.tolist()]  # type: ignore[operator]
    return sum(one is not None and bool(truth[one] > SHARE) for one in chosen) / SPLITS


def in_order(counts: list[int]) -> int | None:
    return choose_nested(counts, PROMPTS, SHARE, CONFIDENCE)


def largest_that_passes(counts: list[int]) -> int | None:
    """The tempting wrong way: try all, keep the last that looks good."""
    most = allowed(PROMPTS, SHARE, CONFIDENCE)
    assert most is not None
    good = [i for i, k in enumerate(counts) if k <= most]
    return good[-1] if good else None


@pytest.mark.parametrize("rise", [0.0, 0.02, 0.1, 0.3])
def test_the_statement_is_false_at_most_as_often_as_said(rise: float) -> None:
    margin = 3 * (CONFIDENCE * (1 - CONFIDENCE) / SPLITS) ** 0.5
    assert false_statements(population(rise, 0), in_order) <= 1 - CONFIDENCE + margin


def test_the_simulation_can_fail() -> None:
    """Sets just above the share, each with its own noise: choosing the best-looking one is caught."""
    generator = torch.Generator().manual_seed(3)
    damage = (torch.rand(12, 2000, generator=generator) < 0.11).double() * 2
    assert false_statements(damage, largest_that_passes) > 0.3
    assert false_statements(damage, in_order) <= 1 - CONFIDENCE + 0.015


@pytest.mark.parametrize(("share", "confidence"), [(0.1, 0.95), (0.2, 0.9), (0.05, 0.99)])
@pytest.mark.parametrize("exceeding", [0, 1, 3])
def test_the_fewest_prompts_that_let_some_exceed(share: float, confidence: float, exceeding: int) -> None:
    n = prompts_needed(share, confidence, exceeding)
    tail = [sum(math.comb(m, k) * share**k * (1 - share) ** (m - k) for k in range(exceeding + 1)) for m in (n - 1, n)]
    assert tail[1] <= 1 - confidence < tail[0]

"""Shares of parts against loops over tokens; tokens with massive activations, zeros, batches."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from duat_cli.models.shares import PartNumbers, Shares, shares, shares_each


def drawn(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(parts: list[Tensor], whole: Tensor) -> Shares:
    square = float((whole * whole).sum())
    tokens = [t for t in range(len(whole)) if whole[t].any()]
    found = []
    for part in parts:
        own = [float(part[t] @ whole[t] / (whole[t] @ whole[t])) for t in tokens]
        norm = float(part.norm()) / square**0.5
        found.append(PartNumbers(float((part * whole).sum()) / square, norm, statistics.median(own)))
    return Shares(found, max(float(row @ row) for row in whole) / square)


def same(got: Shares, expected: Shares, rel: float = 1e-12) -> None:
    assert got.largest_token == pytest.approx(expected.largest_token, rel=rel)
    for one, other in zip(got.parts, expected.parts, strict=True):
        assert vars(one) == pytest.approx(vars(other), rel=rel)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6])
def test_shares_are_those_of_loops_over_tokens(tokens: int) -> None:
    parts = [drawn(tokens, 1), drawn(tokens, 2)]
    whole = parts[0] + parts[1]
    got = shares(parts, whole)
    same(got, by_loops(parts, whole))
    assert sum(part.share or 0.0 for part in got.parts) == pytest.approx(1.0, rel=1e-12)


def test_a_massive_activation_makes_the_share_and_not_the_median() -> None:
    """One part makes one token, a thousand times larger than the others, which are all the other part's."""
    few, most = torch.zeros(7, 4), torch.ones(7, 4)
    few[0], most[0] = 1e3, 0.0
    first, second = shares([few, most], few + most).parts
    assert first.share == pytest.approx(1.0, abs=1e-5)
    assert second.share == pytest.approx(6e-6, rel=1e-4)
    assert (first.token_median, second.token_median) == (0.0, 1.0)
    assert shares([few, most], few + most).largest_token == pytest.approx(1.0, abs=1e-5)
    assert shares([most], most).largest_token == pytest.approx(1 / 6)


def test_tokens_of_zeros_have_no_share_and_a_vector_of_zeros_no_numbers() -> None:
    parts = [drawn(5, 1), drawn(5, 2)]
    whole = parts[0] + parts[1]
    whole[1:3] = 0.0
    same(shares(parts, whole), by_loops(parts, whole))
    assert shares(parts, torch.zeros_like(whole)) == Shares([PartNumbers(None, None, None)] * 2, None)


def test_prompts_of_a_batch_are_each_as_alone() -> None:
    parts = [drawn(6, 1), drawn(6, 2)]
    whole = parts[0] + parts[1]
    whole[2:4] = 0.0
    first, zero, last = shares_each(parts, whole, 3)
    assert zero == Shares([PartNumbers(None, None, None)] * 2, None)
    for got, here in ((first, slice(0, 2)), (last, slice(4, 6))):
        same(got, by_loops([part[here] for part in parts], whole[here]))


def test_half_precision_is_summed_in_float32() -> None:
    """Squares of 1e5 are beyond float16, and sums of bfloat16 would lose most digits."""
    parts = [(300 * drawn(64, 1)).to(torch.bfloat16), (300 * drawn(64, 2)).to(torch.bfloat16)]
    whole = (parts[0].double() + parts[1].double()).to(torch.bfloat16)
    same(shares(parts, whole), by_loops([part.double() for part in parts], whole.double()), rel=1e-5)

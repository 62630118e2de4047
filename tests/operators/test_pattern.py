"""The share of entries that can be nonzero, against the dense W' of factors with zeros in every place."""

from __future__ import annotations

import pytest
import torch
from helpers import kron_sum
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors
from duat_cli.operators.pattern import EntryPattern


def positive(*shape: int, seed: int) -> Tensor:
    """Nothing cancels, so that what is zero in the dense W' is structurally zero."""
    return 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sparse(*shape: int, keep: float, seed: int) -> Tensor:
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 100)) < keep
    return positive(*shape, seed=seed) * kept


def dense_share(H: Tensor, factors: HeadFactors) -> float:
    return float((kron_sum(H, factors.maps()) != 0).double().mean())


def share(H: Tensor, factors: HeadFactors) -> float:
    return EntryPattern(factors).filled(H.abs().flatten(1)) / H.shape[-1] ** 2


def causal(heads: int, tokens: int, seed: int = 0) -> Tensor:
    return positive(heads, tokens, tokens, seed=seed).tril()


def disjoint() -> HeadFactors:
    """Head 0 maps the first half of the width to itself, head 1 the second."""
    value, output = positive(2, 8, 3, seed=1), positive(2, 3, 8, seed=2)
    value[0, 4:], value[1, :4] = 0, 0
    output[0, :, 4:], output[1, :, :4] = 0, 0
    return HeadFactors(value, output)


def test_two_disjoint_heads_fill_half() -> None:
    full = torch.ones(2, 5, 5, dtype=torch.float64)
    assert share(full, disjoint()) == 0.5 == dense_share(full, disjoint())


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 3)])
def test_it_is_the_count_over_the_dense_operator(keep: float, heads: int, kv_heads: int) -> None:
    for seed in range(5):
        factors = HeadFactors(
            sparse(kv_heads, 9, 4, keep=keep, seed=seed), sparse(heads, 4, 9, keep=keep, seed=seed + 50)
        )
        for H in (causal(heads, 5), sparse(heads, 5, 5, keep=0.5, seed=seed)):
            assert share(H, factors) == pytest.approx(dense_share(H, factors), abs=1e-15)


def test_heads_that_reach_different_tokens_are_counted_block_by_block() -> None:
    """Head 0 sees the past, head 1 the token itself: a block has the entries of the heads that reach it."""
    H = causal(2, 6)
    H[1] = torch.eye(6)
    assert share(H, disjoint()) == pytest.approx(dense_share(H, disjoint()), abs=1e-15)
    assert dense_share(H, disjoint()) == pytest.approx((21 * 0.25 + 6 * 0.25) / 36)


def test_a_head_that_vanishes_at_some_tokens_changes_nothing_where_the_others_reach_all() -> None:
    """As where softmax underflows in one head of many."""
    H, factors = causal(3, 6), HeadFactors(positive(3, 8, 2, seed=1), positive(3, 2, 8, seed=2))
    H[1, 4, 2] = H[2, 5, :4] = 0
    assert share(H, factors) == pytest.approx(21 / 36, abs=1e-15) == dense_share(H, factors)


@pytest.mark.parametrize("keep", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rank", [1, 2])
def test_channels_that_read_rows_of_their_own(rank: int, keep: float) -> None:
    """As of a kernel that treats each channel by itself; every block is reached by another set of heads."""
    heads = 5
    value = torch.eye(heads * rank + 2, dtype=torch.float64)[:, : heads * rank].reshape(-1, heads, rank).transpose(0, 1)
    output = sparse(heads, rank, heads * rank + 2, keep=keep, seed=3)
    factors, H = HeadFactors(value, output), sparse(heads, 6, 6, keep=0.5, seed=4)
    assert share(H, factors) == pytest.approx(dense_share(H, factors), abs=1e-15)


def test_counts_stand_for_repeated_blocks() -> None:
    vectors = torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 0.0]], dtype=torch.float64)  # of three blocks
    counts = torch.tensor([2.0, 3.0, 7.0], dtype=torch.float64)
    assert EntryPattern(disjoint()).filled(vectors, counts) == pytest.approx(2 * 0.5 + 3 * 0.25)


def test_nothing_is_zero() -> None:
    nothing = HeadFactors(torch.zeros(2, 4, 2), torch.ones(2, 2, 4))
    assert share(torch.ones(2, 3, 3), nothing) == 0.0
    assert share(torch.zeros(2, 3, 3), disjoint()) == 0.0

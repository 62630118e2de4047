"""Closed forms of a W' with gated channels, against the dense matrix written out entry by entry."""

from __future__ import annotations

import pytest
import torch
from helpers import correlation_of, coupling_of, effective_number, kronecker_singular_values, weighted_coupling_of
from torch import Tensor

from duat_cli.operators import gated
from duat_cli.operators.coupling import channel_squares
from duat_cli.operators.gated import ChannelGram, GatedSums
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, channels, effective_heads

HEADS, KV, N, D, M = 4, 2, 5, 3, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def whole() -> KroneckerSum:
    left = normal(HEADS, N, N, seed=1).tril()
    left[:, 3] *= 1e-30  # whose squares are far below the others'
    return KroneckerSum(
        left, HeadFactors(normal(KV, M, D, seed=2), normal(HEADS, D, M, seed=3)), normal(HEADS, N, D, seed=4)
    )


def by_hand(whole: KroneckerSum) -> Tensor:
    W = torch.zeros(N, M, N, M, dtype=torch.float64)
    factors, gate = whole.factors, whole.gate
    assert gate is not None
    for h in range(HEADS):
        for i in range(N):
            A = factors.value[h // factors.groups] @ torch.diag(gate[h, i]) @ factors.output[h]
            for j in range(N):
                W[i, :, j] += whole.left[h, i, j] * A.T
    return W.reshape(N * M, N * M)


def test_dense_apply_and_channels_are_the_same_operator(whole: KroneckerSum) -> None:
    W, X = by_hand(whole), normal(N, M, seed=5)
    assert torch.allclose(whole.dense(), W, atol=1e-13)
    assert torch.allclose(whole.apply(X).reshape(-1), W @ X.reshape(-1), atol=1e-12)
    assert torch.allclose(whole.apply_transposed(X).reshape(-1), W.T @ X.reshape(-1), atol=1e-12)
    assert whole.gate is not None
    left = (whole.left[:, None] * whole.gate.transpose(1, 2)[..., None]).flatten(0, 1)
    assert torch.allclose(KroneckerSum(left, channels(whole.factors)).dense(), W, atol=1e-13)


@pytest.mark.parametrize("rows_at_once", [1, 2, N])
def test_every_number_is_that_of_the_dense_matrix(whole: KroneckerSum, rows_at_once: int) -> None:
    W, X, gate = by_hand(whole), normal(N, M, seed=5), whole.gate
    assert gate is not None
    sums = GatedSums(ChannelGram(whole.factors), gate)
    values = (X @ whole.factors.value).repeat_interleave(whole.factors.groups, 0)
    squares, weighted = [], []
    for first in range(0, N, rows_at_once):
        rows = whole.left[:, first : first + rows_at_once]
        squares.append(sums.add(rows, first)[0])
        here = gate[:, first : first + rows_at_once]
        weighted.append(channel_squares(rows, values, whole.factors.output.flatten(0, 1), here))
    assert torch.allclose(torch.cat(squares).sqrt(), coupling_of(W, N), rtol=1e-10)
    assert torch.allclose(torch.cat(weighted).sqrt(), weighted_coupling_of(W, X), rtol=1e-10)
    assert sums.energy**0.5 == pytest.approx(float(W.norm()), rel=1e-12)
    spectrum, expected = sums.spectrum(), kronecker_singular_values(W, N)
    assert spectrum is not None
    assert effective_heads(spectrum) == pytest.approx(effective_number(expected), rel=1e-10)
    assert torch.allclose(spectrum[:3], expected[:3].to(spectrum), rtol=1e-9)
    assert sums.block_correlation() == pytest.approx(correlation_of(W, N), rel=1e-9)
    assert sums.nonzero_blocks == N * (N + 1) // 2


def test_a_gate_of_ones_changes_nothing(whole: KroneckerSum) -> None:
    ones = torch.ones(HEADS, N, D, dtype=torch.float64)
    plain = KroneckerSum(whole.left, whole.factors)
    assert torch.allclose(KroneckerSum(whole.left, whole.factors, ones).dense(), plain.dense(), atol=1e-13)
    assert not torch.allclose(whole.dense(), plain.dense(), atol=1e-3)


def test_too_many_tokens_leave_the_sums_and_nothing_else(whole: KroneckerSum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "SPECTRUM_SIDE", 3)
    assert whole.gate is not None
    sums = GatedSums(ChannelGram(whole.factors), whole.gate)
    sums.add(whole.left, 0)
    assert (sums.spectrum(), sums.block_correlation()) == (None, None)
    assert sums.energy > 0

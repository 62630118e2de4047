"""The Lanczos spectral norm against torch's SVD of the dense matrix."""

from __future__ import annotations

import pytest
import torch
from helpers import kron_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum
from duat_cli.operators.leading import spectral_norm


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm_of(A: Tensor, **options: float) -> float:
    return spectral_norm(lambda x: A @ x, lambda y: A.T @ y, normal(A.shape[1], seed=99), **options)  # type: ignore[arg-type]


def square(A: Tensor) -> Tensor:
    """A with zero rows or columns beside it: W' maps a space to itself."""
    side = max(A.shape)
    padded = torch.zeros(side, side, dtype=A.dtype)
    padded[: A.shape[0], : A.shape[1]] = A
    return padded


def with_singular_values(values: list[float], side: int = 0) -> Tensor:
    n = len(values)
    left, right = torch.linalg.qr(normal(side or n, n))[0], torch.linalg.qr(normal(n, n, seed=1))[0]
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right


MATRICES = {
    "random": normal(30, 30),
    "zero rows": square(normal(10, 40)),
    "zero columns": square(normal(40, 10)),
    "zero": torch.zeros(7, 7, dtype=torch.float64),
    "identity": torch.eye(12, dtype=torch.float64),
    "rank one": torch.outer(normal(20), normal(20, seed=1)),
    "one entry": torch.tensor([[-3.0]], dtype=torch.float64),
    "nilpotent": torch.diag(torch.ones(9, dtype=torch.float64), 1),
    "clustered": with_singular_values([1.0, *[1 - 1e-4 * k for k in range(1, 30)]]),
    "two the same": with_singular_values([2.0, 2.0, *[1.0] * 20]),
    "slow decay": with_singular_values([1 / (1 + 0.01 * k) for k in range(60)]),
    "rank two": with_singular_values([5.0, 4.999, *[0.0] * 20]),
    "clustered with a kernel": square(with_singular_values([1.0, *[0.999] * 15], side=50)),
    "tiny": 1e-30 * normal(15, 15),
    "huge": 1e30 * normal(15, 15),
}


@pytest.mark.parametrize("name", list(MATRICES))
def test_it_is_the_largest_singular_value(name: str) -> None:
    A = MATRICES[name]
    assert norm_of(A) == pytest.approx(float(torch.linalg.matrix_norm(A, ord=2)), rel=1e-3, abs=0.0)


def test_zero_is_exactly_zero() -> None:
    assert norm_of(torch.zeros(5, 5, dtype=torch.float64)) == 0.0


def test_it_never_exceeds_the_true_norm() -> None:
    """A Ritz value is the norm of a compression."""
    for seed in range(20):
        A = normal(25, 25, seed=seed)
        assert norm_of(A) <= float(torch.linalg.matrix_norm(A, ord=2)) * (1 + 1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "width"), [(4, 2, 9, 12), (1, 1, 9, 6), (3, 3, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_an_attention_operator(heads: int, kv_heads: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    H = (2 * normal(heads, tokens, tokens)).softmax(-1).tril()
    known = HeadFactors(normal(kv_heads, width, 3, seed=1), normal(heads, 3, width, seed=2))
    W = KroneckerSum(H.to(dtype), HeadFactors(known.value.to(dtype), known.output.to(dtype)))
    start = normal(tokens, width, seed=3).to(dtype)
    expected = float(torch.linalg.matrix_norm(kron_sum(H, known.maps()), ord=2))
    assert spectral_norm(W.apply, W.apply_transposed, start) == pytest.approx(expected, rel=1e-3)


def test_a_wrong_adjoint_would_show() -> None:
    """The comparison above can fail: with A in place of Aᵀ the number is another one."""
    A = MATRICES["rank one"]
    got = spectral_norm(lambda x: A @ x, lambda y: A @ y, normal(20, seed=99))
    assert got != pytest.approx(float(torch.linalg.matrix_norm(A, ord=2)), rel=1e-2)


def test_what_does_not_converge_is_refused() -> None:
    with pytest.raises(InputError, match="within 2 Lanczos steps"):
        norm_of(MATRICES["slow decay"], max_steps=2)


@settings(max_examples=25)
@given(side=st.integers(1, 20), rank=st.integers(0, 20), seed=st.integers(0, 10**6))
def test_every_size_and_rank(side: int, rank: int, seed: int) -> None:
    A = normal(side, rank, seed=seed) @ normal(rank, side, seed=seed + 1)
    expected = float(torch.linalg.matrix_norm(A, ord=2))
    assert norm_of(A) == pytest.approx(expected, rel=1e-3, abs=1e-300)

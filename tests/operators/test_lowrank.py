"""Closed forms of a low-rank change against the dense matrix, and their blindness to the gauge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.operators.leading import leading
from duat_cli.operators.lowrank import LowRank, inner, overlap, singular, spectrum


def draw(rows: int, columns: int, rank: int, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    factors = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((rows, rank), (rank, columns)))
    return LowRank(*factors)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))


@given(shapes)
def test_the_svd_is_that_of_the_dense_product(shape: tuple[int, int, int, int]) -> None:
    change = draw(*shape)
    found, dense = singular(change), change.dense()
    torch.testing.assert_close(found.left @ found.values.diag() @ found.right.mT, dense)
    expected = torch.linalg.svdvals(dense)
    torch.testing.assert_close(found.values[: len(expected)], expected[: len(found.values)], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(change.mT.dense(), dense.mT)


@given(shapes, st.integers(100, 120), st.integers(1, 5))
def test_inner_products_of_every_pair_of_forms(shape: tuple[int, int, int, int], seed: int, rank: int) -> None:
    a, b = draw(*shape), draw(shape[0], shape[1], rank, seed)
    expected = float((a.dense() * b.dense()).sum())
    for x in (a, a.dense()):
        for y in (b, b.dense()):
            assert inner(x, y) == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(a.minus(b).dense(), a.dense() - b.dense())


def test_nothing_depends_on_the_gauge() -> None:
    change, other = draw(20, 15, 4), draw(20, 15, 3, 1)
    gauge = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 3 * torch.eye(4)
    turned = LowRank(change.left @ gauge, torch.linalg.inv(gauge) @ change.right)
    torch.testing.assert_close(singular(turned).values, singular(change).values)
    assert inner(turned, other) == pytest.approx(inner(change, other))
    cosines = overlap(singular(turned).left, singular(change).left)
    torch.testing.assert_close(cosines, torch.ones(4, dtype=torch.float64))


def test_a_large_dense_spectrum_by_its_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch.randn(40, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(dense)
    monkeypatch.setattr("duat_cli.operators.lowrank.EXACT_SIDE", 1)
    for matrix in (dense, dense.mT):
        torch.testing.assert_close(spectrum(matrix), expected)


@pytest.mark.parametrize("shape", [(60, 45), (45, 60)])
def test_leading_triplets(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = leading(lambda x: matrix @ x, lambda y: matrix.mT @ y, matrix[0], shape[1], 5, tolerance=1e-8)
    assert found is not None
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(found.values, s[:5])
    torch.testing.assert_close((found.left.mT @ u[:, :5]).abs(), torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close((found.right.mT @ vh[:5].mT).abs(), torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_leading_says_none_where_there_are_not_enough_directions() -> None:
    for matrix in (torch.eye(30, dtype=torch.float64), draw(30, 20, 3).dense(), torch.zeros(5, 5, dtype=torch.float64)):
        columns = matrix.shape[1]
        assert leading(lambda x, m=matrix: m @ x, lambda y, m=matrix: m.mT @ y, matrix[0], columns, 5) is None


def test_fewer_directions_where_asked_for() -> None:
    matrix = draw(30, 20, 3).dense()
    found = leading(lambda x: matrix @ x, lambda y: matrix.mT @ y, matrix[0], 20, 5, fewer=True)
    assert found is not None
    torch.testing.assert_close(found.values, torch.linalg.svdvals(matrix)[:3])
    zero = torch.zeros(5, 5, dtype=torch.float64)
    assert leading(lambda x: zero @ x, lambda y: zero @ y, zero[0], 5, 3, fewer=True) is None

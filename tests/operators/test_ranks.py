"""Ranks by hand, and the rounding floor: above what rounding makes in any dtype, shape and scale, not far above."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.operators.lowrank import ranks, rounding_floor, spectrum, svd_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(x, ord=2))


def test_ranks_by_hand() -> None:
    found = ranks(torch.tensor([2.0, 1.0, 1.0, 1e-20], dtype=torch.float64), (10, 10), 2e-16)
    assert found is not None
    assert (found.numerical, found.energy_90) == (3, 3)
    assert found.stable == pytest.approx(6 / 4)
    p = [4 / 6, 1 / 6, 1 / 6]
    assert found.entropy == pytest.approx(torch.tensor([-x * torch.tensor(x).log() for x in p]).sum().exp().item())
    assert ranks(torch.zeros(3, dtype=torch.float64), (3, 3), 2e-16) is None


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.sampled_from(DTYPES),
    st.sampled_from([*DTYPES, torch.float64]),
    st.sampled_from(["plain", "rows", "columns", "tiny"]),
    st.integers(0, 10**6),
)
def test_rounding_alone_stays_below_the_floor(
    shape: tuple[int, int], old: torch.dtype, new: torch.dtype, kind: str, seed: int
) -> None:
    exact = matrix(*shape, seed)
    if kind == "rows":
        exact *= 4 ** matrix(shape[0], 1, seed + 1)
    elif kind == "columns":
        exact *= 4 ** matrix(1, shape[1], seed + 1)
    elif kind == "tiny":  # in float16 below the normal numbers
        exact *= 2e-6
    before, after = exact.to(old), exact.to(new)
    difference = after.double() - before.double()
    assert norm(difference) <= rounding_floor(before, after, difference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_so_does_the_rounding_of_a_product_that_was_added(dtype: torch.dtype, size: float, rank: int) -> None:
    """Merged as PEFT does it: product, scale and sum rounded one after another; the floor is within 40 of the error."""
    for seed, (rows, columns) in enumerate([(96, 96), (40, 200)]):
        before = matrix(rows, columns, seed).to(dtype)
        left, right = matrix(rows, rank, seed + 10).to(dtype), matrix(rank, columns, seed + 20).to(dtype)
        scale = 1.75 * size / rank**0.5
        after = before + ((left.float() @ right.float()).to(dtype) * scale).to(dtype)
        difference = after.double() - before.double()
        error = norm(difference - left.double() @ right.double() * scale)
        floor = rounding_floor(before, after, difference)
        assert error < floor < 40 * error


def test_the_spacing_below_the_normal_numbers_of_float16() -> None:
    """They are 2^-24 apart there: the floor of a matrix of them does not shrink with them."""
    small = torch.full((16, 16), 2.0**-20, dtype=torch.float16)
    smaller = torch.full((16, 16), 2.0**-23, dtype=torch.float16)
    zero = torch.zeros(16, 16, dtype=torch.float64)
    assert rounding_floor(small, small, zero) == rounding_floor(smaller, smaller, zero)
    expected = 1.05 * 2 * (16 * 2 * (2.0**-24) ** 2 / 12) ** 0.5
    assert rounding_floor(small, small, zero) == pytest.approx(expected)


@pytest.mark.parametrize("side", [300, 1100])
def test_noise_of_the_singular_values_themselves_is_counted(side: int) -> None:
    """Of an exact product of rank 4, by a dense SVD and, over 1024 wide, by a Gram matrix."""
    left, right = matrix(side, 4, 1).round(decimals=1) * 16, matrix(4, side + 5, 2).round(decimals=1)
    exact = (left * 1024).round() @ (right * 1024).round()  # integers: no rounding
    values = spectrum(exact)
    off = svd_error(tuple(exact.shape), float(values[0]), partial=False)
    assert float(values[4]) < off < 1e-5 * float(values[3])
    assert int((values > off).sum()) == 4


@pytest.mark.parametrize(("rows", "columns"), [(300, 300), (100, 400)])
def test_the_floor_is_just_above_what_rounding_makes(rows: int, columns: int) -> None:
    """And a true change of rank 8 stands out from it, where the numerical rank reads rounding as rank."""
    exact = matrix(rows, columns, 4)
    before, change = exact.bfloat16(), 0.02 * matrix(rows, 8, 5) @ matrix(8, columns, 6)
    after = (exact + change).bfloat16()
    difference = after.double() - before.double()
    floor = rounding_floor(before, after, difference)
    noise = norm(difference - change)
    assert noise < floor < 1.25 * noise
    values = torch.linalg.svdvals(difference)
    assert int((values > floor).sum()) == 8
    found = ranks(values, (rows, columns), 2e-16)
    assert found is not None
    assert found.numerical == min(rows, columns)

"""Scales over grids: against loops over single elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantised_golden import Entry, values

from duat_cli.loading.quantised.formula import UnfitError
from duat_cli.loading.quantised.scaled import scaled

GRIDS = [
    ((5, 6), (), (), (5, 6)), ((5, 6), (1,), (), (5, 6)), ((5, 6), (5, 1), (), (1, 6)), ((5, 6), (5,), (), (1, 6)),
    ((6, 6), (2, 3), [(3, 2)], (3, 2)), ((5, 6), (1, 6), (), (5, 1)),
    ((5, 7), (3, 2), [(2, 4)], (2, 4)), ((3, 7), (2, 2), [(2, 4)], (2, 4)),
    ((3, 4, 6), (3, 2, 3), [(2, 2)], (2, 2)), ((3, 4, 6), (3,), (), (4, 6)), ((3, 4, 6), (3, 1, 1), (), (4, 6)),
    ((3, 5, 6), (3, 3, 2), [(2, 4)], (2, 4)), ((3, 4, 6), (1,), (), (12, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "grid", "blocks", "block"), GRIDS)
def test_a_grid_of_scales(
    shape: tuple[int, ...], grid: tuple[int, ...], blocks: list[tuple[int, int]], block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scale = torch.rand(grid, generator=generator)
    zero = torch.randint(-128, 128, grid, generator=generator).to(torch.int8)
    stored = {"w": codes, "s": scale, "z": zero}
    entries = {"w": Entry(shape, "I8"), "s": Entry(grid, "F32"), "z": Entry(grid, "I8")}
    formula = scaled(entries, "w", "s", zero="z", blocks=blocks)
    assert formula.block == block
    expected = np.empty(shape, np.float32)
    for at in np.ndindex(shape):
        row, column = at[-2] // block[0], at[-1] // block[1]
        place = (*at[:-2], row, column)[: len(grid)] if scale.numel() > 1 else (0,) * len(grid)
        expected[at] = np.float32(int(codes[at]) - int(zero[place])) * scale[place].numpy()
    assert np.array_equal(values(formula, stored).numpy(), expected)
    assert np.array_equal(values(formula, stored, at_once=2).numpy(), expected)


@pytest.mark.parametrize(
    ("shape", "grid", "blocks"),
    [
        ((5, 6), (2, 3), []), ((5, 6), (6,), []), ((5, 6), (5, 6, 1), []), ((5, 6), (0, 1), []),
        ((3, 4, 6), (2, 2, 3), []), ((3, 4, 6), (3, 4, 6, 1), []), ((5, 7), (2, 2), [(2, 4)]),
        ((6, 6), (2, 3), []), ((6, 6), (2, 3), [(2, 3)]), ((96, 64), (3,), []),
    ],
)  # fmt: skip
def test_a_grid_that_does_not_fit(shape: tuple[int, ...], grid: tuple[int, ...], blocks: list[tuple[int, int]]) -> None:
    with pytest.raises(UnfitError, match="does not fit the quantised 'w'"):
        scaled({"w": Entry(shape, "I8"), "s": Entry(grid, "F32")}, "w", "s", blocks=blocks)


def test_zero_points_of_another_shape() -> None:
    entries = {"w": Entry((4, 4), "I8"), "s": Entry((4, 1), "F32"), "z": Entry((4, 2), "I8")}
    with pytest.raises(UnfitError, match=r"'z': shape \[4, 2\]"):
        scaled(entries, "w", "s", zero="z")

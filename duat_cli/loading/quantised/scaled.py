"""Numbers of eight bits (or four) with scales over a grid: FP8 of DeepSeek-V3 and Qwen, int8 and FP8 of
compressed-tensors, int8 of bitsandbytes.

    W[i, j] = (Q[i, j] - Z[i / m, j / n]) S[i / m, j / n]        blocks of m x n, which may be whole rows or tensors
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from duat_cli.loading.quantised.formula import FLOATS, Arrays, Formula, Tensor, misshapen, require
from duat_cli.loading.quantised.numbers import LARGEST, Floats, floats, fp4, scales_of


@dataclass(frozen=True, kw_only=True)
class Scaled(Formula):
    """Numbers with scales over a grid. Roles: values, scales, and zeros where zero points are stored."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    grid: tuple[int, int]
    """Number of blocks of a matrix, down its rows and across its columns."""
    height: int
    """Rows of a matrix; all rows of the tensor if it has one scale."""
    pairs: bool
    """Whether a byte holds two numbers of four bits."""
    times: float | None
    """A factor that the product of values and scales is multiplied by; None for no factor."""

    def rows(self, arrays: Arrays, start: int, stop: int) -> Floats:
        held = arrays["values"]
        part = held.reshape(-1, held.shape[-1])[start:stop]
        values = fp4(part) if self.pairs else floats(part, self.dtypes["values"])
        at = np.arange(start, stop)
        line = at // self.height * self.grid[0] + at % self.height // self.block[0]
        across, width = self.grid[1], self.block[1]
        blocks = values.reshape(len(at), across, width) if across * width == self.shape[-1] else values[..., None]
        if "zeros" in arrays:
            blocks -= self._spread(floats(arrays["zeros"], self.dtypes["zeros"]), line)
        blocks *= self._spread(scales_of(arrays["scales"], self.dtypes["scales"]), line)
        if self.times is not None:
            blocks *= np.float32(self.times)
        return values

    def _spread(self, grid: Floats, line: NDArray[np.intp]) -> Floats:
        """The entries of the grid for some rows: one for each block of a row, or one for each column where the last
        block is cut."""
        chosen = grid.reshape(-1, self.grid[1])[line]
        if self.grid[1] * self.block[1] != self.shape[-1]:
            chosen = np.repeat(chosen, self.block[1], axis=1)[:, : self.shape[-1]]
        return chosen[..., None]


def scaled(
    tensors: Mapping[str, Tensor],
    name: str,
    scale: str,
    *,
    zero: str | None = None,
    blocks: Sequence[tuple[int, int]] = (),
    pairs: bool = False,
    times: float | None = None,
) -> Scaled:
    """The formula of a stored weight; UnfitError where its scales are missing or of another shape. blocks: sizes that
    the config names; the first that fits counts, and if none does, there is a scale for each row or column, or one for
    all. zero: name of its zero points, if it has any."""
    stored = tensors[name]
    shape = (*stored.shape[:-1], stored.shape[-1] * (2 if pairs else 1))
    found = require(tensors, name, scale, dtypes=(*FLOATS, "F8_E8M0", "F8_E4M3", "U8"))
    layout = _layout(shape, found.shape, blocks)
    if layout is None:
        sizes = "".join(f"block of {m} x {n}, " for m, n in blocks)
        raise misshapen(tensors, name, scale, f"expected one scale for each {sizes}row, column or tensor")
    dtypes = {"values": stored.dtype, "scales": found.dtype}
    parts = {"values": name, "scales": scale}
    if zero is not None:
        dtypes["zeros"] = require(tensors, name, zero, found.shape, (*FLOATS, "I8", stored.dtype)).dtype
        parts["zeros"] = zero
    return Scaled(
        shape=shape,
        parts=parts,
        dtypes=dtypes,
        largest=LARGEST["FP4" if pairs else stored.dtype],
        block=layout.block,
        grid=layout.grid,
        height=layout.height,
        pairs=pairs,
        times=times,
    )


class _Layout(NamedTuple):
    block: tuple[int, int]
    grid: tuple[int, int]
    height: int


def _layout(shape: tuple[int, ...], grid: tuple[int, ...], blocks: Sequence[tuple[int, int]]) -> _Layout | None:
    """The layout of scales of the shape `grid`; None if no grid of known blocks has that shape, because sizes would be
    guessed. Each expert in front of the matrices has a grid of its own."""
    if math.prod(grid) == 1:
        every = math.prod(shape[:-1])
        return _Layout((every, shape[-1]), (1, 1), every)
    *above, height, width = (1, *shape) if len(shape) == 1 else shape
    if list(grid[: len(above)]) != above or len(grid) - len(above) > 2:
        return None
    down, across = (*grid[len(above) :], 1, 1)[:2]
    for m, n in blocks:
        if (down, across) == (-(-height // m), -(-width // n)):
            return _Layout((m, n), (down, across), height)
    if down in (1, height) and across in (1, width):
        return _Layout((height // down, width // across), (down, across), height)
    return None

"""Numbers of eight bits (or four) with scales over a grid: FP8 of DeepSeek-V3 and Qwen, int8 and FP8 of
compressed-tensors, int8 of bitsandbytes.

    W[i, j] = (Q[i, j] - Z[i / m, j / n]) S[i / m, j / n]        blocks of m x n; whole rows, whole tensors as well
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
    """Roles: values, scales, and zeros where a zero point is stored."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    grid: tuple[int, int]
    """How many blocks a matrix has, by rows and columns."""
    height: int
    """Rows of a matrix; of one scale for all, all rows."""
    pairs: bool = False
    """Whether a byte holds two numbers of four bits."""
    times: float | None = None
    """What values and scales are multiplied by, last."""

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
        """One for each block of a row; for each column where the last block is cut."""
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
    the config names, of which the first that fits is meant; without one scales are of rows, columns or all. zero: its
    zero points, if it has any."""
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
    """None where no grid of blocks is of that shape: other sizes would be guessed. In front of matrices, experts have
    one grid each."""
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

"""What the weights are, tensor by tensor, from one pass over the files.

Besides counts of what is broken every tensor leaves its norm and a sketch: eight numbers

    s_k = sum_i u_ik (sum_j W_ij v_ij),    u, v = +-1 from SHAKE-256,

v anew for every few rows. For two tensors of one shape the mean of (s_k - s'_k)^2 is an unbiased estimate of
|W - W'|^2 (Johnson-Lindenstrauss; its relative standard error is 1/2 with eight numbers, for the norm 1/4), so
that a baseline of eight numbers a tensor tells how far the tensor moved, without the old weights.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from duat_cli.checks.places import BlockPlace, block_of
from duat_cli.loading.checkpoint import CheckpointFiles
from duat_cli.loading.headers import TensorEntry
from duat_cli.loading.stream import LONGEST_ROW, Piece, Streamed, stream

PROBES = 8
_POOL = 1 << 18
_SMALLEST = 1e-20  # of a piece's energy: below, float32 squares are no longer normal numbers
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "C64"})

Indices = NDArray[np.intp]
_NONE: Indices = np.empty(0, np.intp)


@dataclass(frozen=True)
class TensorFacts:
    """One tensor; rows are all dimensions but the last."""

    entry: TensorEntry
    rows: int
    columns: int
    nonfinite: int
    """NaN and infinite values."""
    norm: float
    """Frobenius norm; of a tensor with non-finite values NaN."""
    sketch: tuple[float, ...]
    """s_k / norm; zeros where the norm is 0."""
    zero_rows: Indices = field(default_factory=lambda: _NONE)
    zero_columns: Indices = field(default_factory=lambda: _NONE)

    @property
    def floating(self) -> bool:
        return self.entry.dtype in _FLOATS

    @property
    def matrix(self) -> bool:
        """A matrix of weights, which no sound checkpoint leaves at zero."""
        return self.floating and len(self.entry.shape) > 1 and self.rows > 1 and self.columns > 1

    @property
    def zero(self) -> bool:
        return self.norm == 0


@dataclass(frozen=True)
class WeightFacts:
    """Every tensor that is not empty, in the order of the files."""

    tensors: dict[str, TensorFacts]

    @property
    def nonfinite(self) -> dict[str, int]:
        return {name: t.nonfinite for name, t in self.tensors.items() if t.nonfinite}

    @property
    def matrices(self) -> dict[str, TensorFacts]:
        return {name: t for name, t in self.tensors.items() if t.matrix}

    @property
    def zero_matrices(self) -> list[str]:
        return [name for name, t in self.matrices.items() if t.zero]

    def blocks(self) -> dict[BlockPlace, dict[str, TensorFacts]]:
        """Block -> its tensors by their names within it."""
        found: dict[BlockPlace, dict[str, TensorFacts]] = {}
        for name, tensor in self.tensors.items():
            place = block_of(name)
            if place is not None:
                found.setdefault(place[0], {})[place[1]] = tensor
        return found


def weight_facts(files: CheckpointFiles, progress: Callable[[int, int, str], None]) -> WeightFacts:
    """One pass over all weight files."""
    found = {}
    total = sum(entry.elements > 0 for entry in files.tensors.values())
    with np.errstate(all="ignore"):  # what overflows is looked at again
        for number, streamed in enumerate(stream(files), 1):
            progress(number, total, "reading the weights")
            found[streamed.name] = _facts(streamed)
    return WeightFacts(found)


def distance(norm: float, sketch: tuple[float, ...], old_norm: float, old_sketch: tuple[float, ...]) -> float:
    """|W - W'| / |W'|, the exact part from the norms, the rest estimated from the sketches.

    |norm - old| / old is a lower bound of it, and stands where the estimate is below. Infinite where a tensor of
    zeros became something else.
    """
    if old_norm == 0:
        return 0.0 if norm == 0 else math.inf
    squares = [(s * norm - o * old_norm) ** 2 for s, o in zip(sketch, old_sketch, strict=True)]
    return max(math.sqrt(math.fsum(squares) / len(squares)), abs(norm - old_norm)) / old_norm


# --- one tensor -------------------------------------------------------------------------------------


def _facts(streamed: Streamed) -> TensorFacts:
    rows, columns = streamed.rows_and_columns
    energy, nonfinite = 0.0, 0
    sums = np.zeros(PROBES)
    zero_rows: list[Indices] = []
    columns_left: Indices | None = None
    for seen, piece in enumerate(streamed.pieces):
        x = piece.values
        signs, rows_signs = _signs(x.shape[1], seen), _row_signs(x.shape[0], seen)
        y = x @ signs  # (rows,)
        part = float(np.dot(x.reshape(-1), x.reshape(-1)))
        if part == 0 and not x.any():
            if piece.whole_rows and columns > 1:
                zero_rows.append(np.arange(piece.row, piece.row + len(x)))
                columns_left = np.arange(columns) if columns_left is None else columns_left
            continue
        if not (math.isfinite(part) and part > _SMALLEST) or not np.isfinite(y).all():
            nonfinite += x.size - int(np.isfinite(x).sum())
            wide = x.astype(np.float64)
            y, part = wide @ signs, float(np.dot(wide.reshape(-1), wide.reshape(-1)))
        energy += part
        sums += y.astype(np.float64) @ rows_signs
        if piece.whole_rows and columns > 1:
            zero_rows.append(_zero_rows(piece, y))
            columns_left = _zero_columns(x, columns_left)
    norm = math.nan if nonfinite else math.sqrt(energy)
    sketch = sums / norm if norm > 0 else np.zeros(PROBES)
    return TensorFacts(
        entry=streamed.entry,
        rows=rows,
        columns=columns,
        nonfinite=nonfinite,
        norm=norm,
        sketch=tuple(float(s) for s in sketch),
        zero_rows=np.concatenate(zero_rows) if zero_rows else _NONE,
        zero_columns=_NONE if columns_left is None else columns_left,
    )


def _zero_rows(piece: Piece, y: NDArray[np.floating]) -> Indices:
    """A row of zeros has the sum 0; so may another, which the second look tells."""
    at = np.flatnonzero(y == 0)
    return at[~piece.values[at].any(axis=1)] + piece.row if at.size else _NONE


def _zero_columns(x: NDArray[np.floating], left: Indices | None) -> Indices:
    """Those of the columns left that are zero here too; a few rows settle nearly all of them."""
    if left is None:
        left = np.flatnonzero(~x[:4].any(axis=0))
    return left[~x[:, left].any(axis=0)] if left.size else left


# --- signs ------------------------------------------------------------------------------------------


def _signs(columns: int, piece: int) -> NDArray[np.float32]:
    """v for a piece: a window of the pool, another one for every piece."""
    pool = _pool(b"duat columns", _POOL + LONGEST_ROW)
    start = piece * 7919 % _POOL
    return pool[start : start + columns]


def _row_signs(rows: int, piece: int) -> NDArray[np.float32]:  # (rows, PROBES)
    pool = _pool(b"duat rows", _POOL + LONGEST_ROW * PROBES // 8)
    start = piece * 104_729 % _POOL
    return pool[start : start + rows * PROBES].reshape(rows, PROBES)


@functools.cache
def _pool(name: bytes, length: int) -> NDArray[np.float32]:
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(name).digest(length // 8), np.uint8))
    return bits.astype(np.float32) * 2 - 1

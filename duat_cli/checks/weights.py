"""Facts about the weights, tensor by tensor, from one pass over the files.

Beside counts of faults, the facts of every tensor are its norm and a sketch. From these nine numbers a baseline shows
how far the tensor moved, without the old weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from duat_cli.checks.places import BlockPlace, block_of
from duat_cli.checks.sketch import FirstSketch, Sketch
from duat_cli.loading.checkpoint.dequantised import stored_parts
from duat_cli.loading.checkpoint.dtypes import RUN_IN, stated_dtype
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.stream import Piece, Streamed, stream

_RUN = 1 << 13  # values in one dot product
_SAME = 1e-6  # largest relative distance of copies; the sketches hold more digits
_SMALLEST = 1e-20  # sum of squares of a piece, below which squares in float32 are not all normal numbers
_FLOATS = frozenset({*RUN_IN, "C64"})
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}

Indices = NDArray[np.intp]
_NONE: Indices = np.empty(0, np.intp)


@dataclass(frozen=True)
class TensorFacts:
    """Facts about one tensor, as a matrix whose rows are all dimensions but the last."""

    entry: TensorEntry
    rows: int
    columns: int
    nonfinite: int
    """Number of NaN and infinite values."""
    norm: float
    """Frobenius norm; NaN for a tensor with non-finite values."""
    sketch: tuple[float, ...]
    """s_k / norm; zeros where the norm is 0."""
    first_sketch: tuple[float, ...] | None
    """The sketch of baselines with schema version 1; None where it was not asked for."""
    zero_rows: Indices
    zero_columns: Indices

    @property
    def floating(self) -> bool:
        return self.entry.dtype in _FLOATS

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix of weights, which no sound checkpoint leaves at zero."""
        return self.floating and len(self.entry.shape) > 1 and self.rows > 1 and self.columns > 1

    @property
    def zero(self) -> bool:
        return self.norm == 0

    @property
    def numbers(self) -> list[float]:
        """Its norm and its sketch, as `distance` takes and a baseline holds them."""
        return [self.norm, *self.sketch]

    def copies(self, other: TensorFacts) -> bool:
        """Whether two tensors of one shape hold the same values; False where one is not finite."""
        return distance(self.numbers, other.numbers) <= _SAME


@dataclass(frozen=True)
class WeightFacts:
    """Facts about every tensor that is not empty, in the order of the files; quantised weights by their values."""

    tensors: dict[str, TensorFacts]
    scales: dict[str, ScaleFacts] = field(default_factory=dict)
    """The scales of quantised weights, by the name of the weight."""

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
        """Block -> its tensors, by their names within the block."""
        found: dict[BlockPlace, dict[str, TensorFacts]] = {}
        for name, tensor in self.tensors.items():
            place = block_of(name)
            if place is not None:
                found.setdefault(place[0], {})[place[1]] = tensor
        return found


def weight_facts(
    files: CheckpointFiles, progress: Callable[[int, int, str], None], *, first_sketch: bool = False
) -> WeightFacts:
    """The facts from one pass over all weight files. first_sketch: whether to add the sketch of schema version 1."""
    total = sum(entry.elements > 0 for entry in files.tensors.values())
    found = facts_of(stream(files), total, progress, first_sketch=first_sketch)
    return replace(found, scales=scale_facts(files))


def facts_of(
    tensors: Iterable[Streamed], total: int, progress: Callable[[int, int, str], None], *, first_sketch: bool = False
) -> WeightFacts:
    """The facts of `total` tensors from any source."""
    found = {}
    with np.errstate(all="ignore"):  # sums that overflow are computed again
        for number, streamed in enumerate(tensors, 1):
            progress(number, total, "reading the weights")
            found[streamed.name] = _facts(streamed, FirstSketch() if first_sketch else None)
    return WeightFacts(found)


def distance(new: Sequence[float], old: Sequence[float]) -> float:
    """|W - W'| / |W'| from two tensors' norms and sketches, estimated by the sketches.

    The estimate is clamped to the possible distances, from |norm - old| / old to (norm + old) / old. Infinite where a
    tensor of zeros has changed.
    """
    norm, old_norm = new[0], old[0]
    if old_norm == 0:
        return 0.0 if norm == 0 else math.inf
    squares = [(s * norm - o * old_norm) ** 2 for s, o in zip(new[1:], old[1:], strict=True)]
    estimate = math.sqrt(math.fsum(squares) / len(squares))
    return min(max(estimate, abs(norm - old_norm)), norm + old_norm) / old_norm


# --- one tensor -------------------------------------------------------------------------------------


def _facts(streamed: Streamed, first: FirstSketch | None) -> TensorFacts:
    rows, columns = streamed.rows_and_columns
    energy, nonfinite, column = 0.0, 0, 0
    sketch, unbounded = Sketch(), _unbounded(streamed)
    zero_rows: list[Indices] = []
    columns_left: Indices | None = None
    for seen, piece in enumerate(streamed.pieces):
        x, start = piece.values, column
        if unbounded is not None and (x == unbounded).all():  # stands for no bound: a 0 among the facts
            continue
        column = (column + x.shape[1]) % columns
        part = _energy(x)
        if part == 0 and not x.any():
            if piece.whole_rows and columns > 1:
                zero_rows.append(np.arange(piece.row, piece.row + len(x)))
                columns_left = np.arange(columns) if columns_left is None else columns_left
            continue
        products = sketch.products(x, piece.row, start)
        if not (math.isfinite(part) and part > _SMALLEST) or not np.isfinite(products).all():
            nonfinite += x.size - int(np.isfinite(x).sum())
            x = x.astype(np.float64)
            products, part = sketch.products(x, piece.row, start), _energy(x)
        energy += part
        sketch.add(products, piece.row)
        if first is not None:
            first.add(x, seen)
        if piece.whole_rows and columns > 1:
            zero_rows.append(_zero_rows(piece, products))
            columns_left = _zero_columns(x, columns_left)
    norm = math.nan if nonfinite else math.sqrt(energy)
    return TensorFacts(
        entry=streamed.entry,
        rows=rows,
        columns=columns,
        nonfinite=nonfinite,
        norm=norm,
        sketch=_relative(sketch.sums, norm),
        first_sketch=None if first is None else _relative(first.sums, norm),
        zero_rows=np.concatenate(zero_rows) if zero_rows else _NONE,
        zero_columns=_NONE if columns_left is None else columns_left,
    )


def _unbounded(streamed: Streamed) -> float | None:
    """The infinity that a tensor may hold because it is the bound of a clamp, one number (Gemma 4's `input_max`); None
    for any other tensor."""
    ends = {"_min": -math.inf, "_max": math.inf}
    return ends.get(streamed.name[-4:]) if streamed.entry.elements == 1 else None


def _energy(x: NDArray[np.floating]) -> float:
    """Sum of squares, in pieces short enough for BLAS to stay in one thread."""
    flat = x.reshape(-1)
    runs = (flat[at : at + _RUN] for at in range(0, flat.size, _RUN))
    return math.fsum(float(np.dot(run, run)) for run in runs)


def _relative(sums: NDArray[np.floating], norm: float) -> tuple[float, ...]:
    return tuple(float(s) for s in (sums / norm if norm > 0 else np.zeros_like(sums)))


def _zero_rows(piece: Piece, products: NDArray[np.floating]) -> Indices:
    """The numbers of the rows that are zero. All products of such a row are 0; since those of others may be too, these
    rows are looked at once more."""
    at = np.flatnonzero(~products.any(axis=1))
    return at[~piece.values[at].any(axis=1)] + piece.row if at.size else _NONE


def _zero_columns(x: NDArray[np.floating], left: Indices | None) -> Indices:
    """The columns of `left` (None: all) that are zero here too; the first rows rule out nearly all others."""
    if left is None:
        left = np.flatnonzero(~x[:4].any(axis=0))
    return left[~x[:, left].any(axis=0)] if left.size else left


# --- the scales of quantised weights: few numbers, each a factor of many weights ------------------------------------


@dataclass(frozen=True)
class ScaleFacts:
    """Facts about the scales of one weight."""

    name: str
    """Name of the tensor that holds the scales."""
    count: int
    nonfinite: int
    zero: int
    """Number of scales that are zero; 0 where the format gives a block of zeros the scale zero."""
    beyond: int
    """Number of finite scales that allow weights above the largest number of the dtype that the weights had."""
    dtype: str
    """That dtype, as config.json states it."""


def scale_facts(files: CheckpointFiles) -> dict[str, ScaleFacts]:
    """Quantised weight -> its scales, which are read once more from a small part of the files."""
    dtype = stated_dtype(files) or "float32"
    limit, found = _LARGEST.get(dtype, np.inf), {}
    for name, entry in files.tensors.items():
        if entry.made is None or not entry.elements:
            continue
        formula = entry.made.formula
        scales = formula.factors(stored_parts(files.path, files.seals, entry.made, formula.scales)).astype(np.float64)
        finite = np.isfinite(scales)
        found[name] = ScaleFacts(
            name=formula.parts[formula.scales[0]],
            count=scales.size,
            nonfinite=int((~finite).sum()),
            zero=0 if formula.zero_blocks else int((scales == 0).sum()),
            beyond=int((np.abs(scales[finite]) * formula.largest > limit).sum()),
            dtype=dtype,
        )
    return found

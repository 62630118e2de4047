"""The values of a checkpoint in one pass over its files: each byte is read once, in the order of the file.

A memory map is not used, because a mapped file that shrinks meanwhile kills the process with SIGBUS. numpy is used
instead of torch, because a command that only looks at weights should not wait seconds for an import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duat_cli.loading.checkpoint.dequantised import pieces
from duat_cli.loading.checkpoint.files import open_file, read_into
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.seal import Seal, require_unchanged
from duat_cli.loading.quantised.numbers import RAW, floats
from duat_cli.text import shown

PIECE = 1 << 17  # values; they fit a core's cache
LONGEST_ROW = 1 << 20  # values; a longer row comes in pieces


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor; all dimensions but the last are rows, a vector is a column."""

    row: int
    """Number of the first row; a row longer than LONGEST_ROW comes as several pieces with the same number."""
    values: NDArray[np.floating]  # (rows, columns), float32, or float64 where the stored values need it
    """Valid until the next piece is asked for."""
    whole_rows: bool


@dataclass(frozen=True)
class Streamed:
    """A tensor whose pieces can be read once; for a quantised weight, pieces of its values."""

    name: str
    entry: TensorEntry
    pieces: Iterator[Piece]

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        return _matrix(self.entry)


def stream(files: CheckpointFiles) -> Iterator[Streamed]:
    """Every tensor that is not empty, in the order of the files. Its pieces are read as they are asked for.

    CheckpointError where a file ends early, cannot be read, or is no longer the one that was checked.
    """
    for shard in files.shards:
        path, seal = files.path / shard, files.seals[shard]
        names = [name for name, entry in files.tensors.items() if entry.shard == shard and entry.elements]
        names.sort(key=lambda name: files.tensors[name].offset)
        require_unchanged(path, seal, names[0] if names else None, header=True)
        for name in names:
            entry = files.tensors[name]
            yield Streamed(name, entry, _computed(files, name) if entry.made else _pieces(path, seal, name, entry))


def _computed(files: CheckpointFiles, name: str) -> Iterator[Piece]:
    """Pieces of a quantised weight, computed from its stored tensors."""
    for row, values in pieces(files.path, files.seals, name, files.tensors[name]):
        yield Piece(row, values, whole_rows=True)


def _matrix(entry: TensorEntry) -> tuple[int, int]:
    """(rows, columns) of a tensor as a matrix; a complex number is two values."""
    values = entry.elements * (2 if entry.dtype == "C64" else 1)
    columns = values // (entry.elements // entry.shape[-1]) if len(entry.shape) > 1 else 1
    return values // columns, columns


def _pieces(path: Path, seal: Seal, name: str, entry: TensorEntry) -> Iterator[Piece]:
    dtype = np.dtype(RAW[entry.dtype])
    rows, columns = _matrix(entry)
    long = columns > LONGEST_ROW
    height = 1 if long else max(1, PIECE // columns)
    buffer = np.empty(min(height, rows) * min(columns, LONGEST_ROW) * dtype.itemsize, np.uint8)
    offset = entry.offset
    with open_file(path) as file:
        for row in range(0, rows, height):
            count = min(height, rows - row)
            for start in range(0, columns, LONGEST_ROW) if long else (0,):
                width = min(LONGEST_ROW, columns - start)
                raw = buffer[: count * width * dtype.itemsize]
                read_into(path, file, offset, raw.data, shown(name))
                require_unchanged(path, seal, name)
                offset += raw.size
                yield Piece(row, _values(raw.view(dtype), entry.dtype).reshape(count, width), not long)


def _values(raw: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    if dtype in ("F32", "F64", "C64"):
        return raw  # type: ignore[return-value]
    # float32 cannot hold integers of more than 24 bits
    return raw.astype(np.float64) if dtype in ("U32", "I32", "U64", "I64") else floats(raw, dtype)

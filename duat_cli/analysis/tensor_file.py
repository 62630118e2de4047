"""A .safetensors file that is written piece by piece, so that no tensor has to be in memory as a whole."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.models.instrument.attention import RowSource
from duat_cli.text import clean

_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
_LITTLE = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}
_LARGEST = {"dtype": "F64", "shape": [1 << 40] * 3, "data_offsets": [1 << 60] * 2}  # longer than any real entry


def require_disk(folder: Path, size: int, what: str, advice: str) -> None:
    """Raises InputError where a folder has no room for so many bytes. what: takes them, the beginning of the message;
    advice: how to need fewer."""
    free = shutil.disk_usage(folder).free
    if size > free:
        gib, left = (f"{count / 2**30:,.1f} GiB" for count in (size, free))
        raise InputError(f"{what} {gib}, {clean(str(folder))} has {left} left; {advice}")


class TensorFile:
    """A file that tensors are added to.

    Format: 8 bytes with the header's length, a JSON header, then the data without gaps. The header holds the place of
    every tensor, so it is written last, into room left for it; spaces fill the rest, as the format allows.
    """

    def __init__(
        self, path: Path, names: Iterable[str], metadata: dict[str, str], later: int, dtype: torch.dtype
    ) -> None:
        """names: of all tensors that may be added; later: most bytes of the metadata that `finish` adds; dtype: of all
        floats."""
        room = len(json.dumps(dict.fromkeys(names, _LARGEST))) + len(json.dumps(metadata)) + later + 64
        self._metadata = metadata
        self._data = 8 + -(-room // 8) * 8  # where the data begins, aligned
        self._end = self._data
        self._entries: dict[str, Any] = {}
        self._file, self._dtype = path.open("r+b" if path.exists() else "w+b"), dtype

    def add(self, name: str, tensor: Tensor) -> None:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        self._add(name, tensor.shape, dtype, [(0, tensor)])

    def add_rows(self, name: str, rows: RowSource) -> None:
        """Adds H, (heads, N, N), in the pieces that a run holds."""
        self._add(name, (rows.heads, rows.tokens, rows.tokens), self._dtype, _row_pieces(rows))

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Adds a tensor as (place, run) pairs, each a run of its elements in row-major order from that place on."""
        start = self._end
        self._end += math.prod(shape) * dtype.itemsize
        for place, run in pieces:
            values = run.detach().to("cpu", dtype).contiguous().numpy()
            self._file.seek(start + place * dtype.itemsize)
            self._file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        offsets = [start - self._data, self._end - self._data]
        self._entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}

    def read(self, name: str) -> Tensor:
        """The tensor that was added under this name."""
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        self._file.seek(self._data + start)
        values = np.frombuffer(bytearray(self._file.read(end - start)), dtype=_LITTLE[entry["dtype"]])
        return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False)).reshape(entry["shape"])

    def finish(self, **later: object) -> None:
        """Writes the header, without which the file is not valid, and closes the file. later: further metadata, written
        as JSON."""
        metadata = self._metadata | {name: json.dumps(value) for name, value in later.items()}
        header = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        room = self._data - 8
        assert len(header) <= room, "more tensors or metadata than announced"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.truncate(self._end)
        self.close()

    def close(self) -> None:
        self._file.close()


def _row_pieces(rows: RowSource) -> Iterator[tuple[int, Tensor]]:
    """Rows of single heads, as (place of the first element in (heads, N, N), rows)."""
    tokens = rows.tokens
    for part, weights in rows.chunks():
        for head, piece in enumerate(weights):
            yield (head * tokens + part.start) * tokens, piece

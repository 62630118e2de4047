"""Tensors of the files by plain reads, in their stored dtype, in the order of the files.

Quantised weights come as the values that their format's formula gives. A memory map is not used, because a mapped file
that shrinks meanwhile kills the process with SIGBUS.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from duat_cli.compat.libc import give_back_free_pages
from duat_cli.loading.checkpoint.dequantised import pieces
from duat_cli.loading.checkpoint.files import fail, open_file, read_into
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.seal import require_unchanged
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.text import shown

THREADS, PIECE = 4, 16 << 20  # bytes


class Reader:
    """Reads tensors of a checkpoint; counts the bytes. CheckpointError where a file is not what was checked."""

    def __init__(
        self, files: CheckpointFiles, homes: Mapping[str, str] | None = None, *, threads: bool = False
    ) -> None:
        """homes: tensor -> the device that keeps it, in its stored dtype, once it has been read. threads: whether
        threads share the reading of large tensors; the end of `with` ends them."""
        self._files, self._homes = files, homes or {}
        self._held: dict[str, Tensor] = {}
        self.bytes_read = 0
        self._checked: set[str] = set()  # shards whose header was read again
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="duat-piece") if threads else None

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The whole tensors, by name."""
        read = self._from_files([name for name in names if name not in self._held])
        for name, tensor in read.items():
            if name in self._homes:
                self._held[name] = tensor.to(self._homes[name])
        return {name: self._held[name] if name in self._held else read[name] for name in names}

    def tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.tensors([name])[name]

    def _from_files(self, names: Sequence[str]) -> dict[str, Tensor]:
        entries = self._files.tensors
        found = {}
        for shard in dict.fromkeys(entries[name].shard for name in names):
            inside = sorted((n for n in names if entries[n].shard == shard), key=lambda n: entries[n].offset)
            path = self._sealed(shard, inside[0])
            unread: list[_Piece] = []
            for name in inside:
                found[name] = torch.empty(entries[name].shape, dtype=self._dtype(name))
                if entries[name].made is None:
                    unread += _pieces(found[name], entries[name].offset, name)
                else:
                    self._compute(name, found[name])
            self._read(path, unread)
            self._sealed(shard, inside[-1])
        return found

    def _dtype(self, name: str) -> torch.dtype:
        entry = self._files.tensors[name]
        if entry.dtype not in STORED:
            what = f"stored as {entry.dtype}, which is not read; save it in full precision"
            fail(self._files.path / entry.shard, f"tensor {shown(name)} cannot be read: {what}")
        return STORED[entry.dtype]

    def _compute(self, name: str, whole: Tensor) -> None:
        """Fills a tensor with the values of a quantised weight."""
        entry = self._files.tensors[name]
        flat = whole.reshape(-1, entry.shape[-1])
        for start, values in pieces(self._files.path, self._files.seals, name, entry):
            flat[start : start + len(values)] = torch.from_numpy(values)
        self._count(entry.bytes)

    def each(self) -> dict[str, Unread]:
        """Every tensor that can be read, by name. Each is read only when it is indexed, which any thread may do."""
        return {name: Unread(self, name) for name, entry in self._files.tensors.items() if entry.dtype in STORED}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends all threads, since a fork must find none, and frees what they read into. Reads that a failed load still
        has under way are not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=kind is None, cancel_futures=True)
        give_back_free_pages()

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a tensor that is not empty, (rows, ...). A quantised weight is computed as a whole."""
        entry = self._files.tensors[name]
        if name in self._homes or entry.made is not None:
            held = self.tensor(name)
            return held[torch.tensor(list(rows), dtype=torch.long, device=held.device)]
        found = torch.empty(len(rows), *entry.shape[1:], dtype=self._dtype(name))
        path, size = self._sealed(entry.shard, name), entry.bytes // entry.shape[0]
        with open_file(path) as file:
            for places, row in _runs(rows):
                for piece in _pieces(found[places], entry.offset + row * size, name):
                    read_into(path, file, piece.offset, piece.view, shown(name))
                    self._count(len(piece.view))
        self._sealed(entry.shard, name)
        return found

    def _sealed(self, shard: str, name: str) -> Path:
        path = self._files.path / shard
        require_unchanged(path, self._files.seals[shard], name, header=shard not in self._checked)
        self._checked.add(shard)
        return path

    def _read(self, path: Path, unread: Sequence[_Piece]) -> None:
        """Reads several pieces at once; reads in turn would each wait for the file and then for fresh memory."""
        if len(unread) == 1 or self._threads is None:
            self._count(_read_pieces(path, unread))
            return
        shares = [unread[k::THREADS] for k in range(THREADS)]
        for done in [self._threads.submit(_read_pieces, path, share) for share in shares if share]:
            self._count(done.result())

    def _count(self, size: int) -> None:
        """Adds to the bytes read, under a lock: one thread reads rows while another reads a page ahead."""
        with self._counting:
            self.bytes_read += size


@dataclass(frozen=True)
class Unread:
    """A tensor that is read as a whole when it is indexed."""

    reader: Reader
    name: str

    def __getitem__(self, place: Any) -> Tensor:
        return self.reader.tensor(self.name)[place]


@dataclass(frozen=True)
class _Piece:
    """Some bytes of a file and where they go."""

    offset: int
    view: memoryview
    name: str  # the tensor's name


def _pieces(found: Tensor, offset: int, name: str) -> list[_Piece]:
    """The pieces of a tensor that begins at `offset` in its file; none for an empty tensor."""
    view = found.reshape(-1).view(torch.uint8).numpy().data
    return [_Piece(offset + start, view[start : start + PIECE], name) for start in range(0, len(view), PIECE)]


def _runs(rows: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Runs of consecutive rows: the places of each run in the list, and its first row."""
    starts = [k for k in range(len(rows)) if not k or rows[k] != rows[k - 1] + 1]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield slice(start, stop), rows[start]


def _read_pieces(path: Path, unread: Sequence[_Piece]) -> int:
    """Reads the pieces; returns their number of bytes."""
    with open_file(path) as file:
        for piece in unread:
            read_into(path, file, piece.offset, piece.view, shown(piece.name))
    return sum(len(piece.view) for piece in unread)

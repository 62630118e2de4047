"""Tensors that several weight files hold: their values must be equal, because readers differ in which file they take.

transformers takes the last file that it reads, an index may name another, and nothing says which is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from duat_cli.loading.checkpoint.files import fail, open_file
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.text import shown

CHUNK = 1 << 20  # bytes


def require_equal(folder: Path, name: str, entries: list[TensorEntry]) -> None:
    """Refuses a tensor whose holders differ in shape, dtype or any byte, and names two of them."""
    for one, other in pairwise(entries):
        if (one.shape, one.dtype) != (other.shape, other.dtype) or not _equal_bytes(folder, one, other):
            fail(folder / one.shard, f"tensor {shown(name)} has other values in {shown(other.shard)}, and readers "
                 "differ in which file they take: delete the stale file, or save the checkpoint again")  # fmt: skip


def _equal_bytes(folder: Path, one: TensorEntry, other: TensorEntry) -> bool:
    return all(a == b for a, b in zip(_chunks(folder, one), _chunks(folder, other), strict=True))


def _chunks(folder: Path, entry: TensorEntry) -> Iterator[bytes]:
    """The tensor's bytes in pieces of one length; a file that ends early gives shorter ones."""
    with open_file(folder / entry.shard) as file:
        file.seek(entry.offset)
        for done in range(0, entry.bytes, CHUNK):
            yield file.read(min(CHUNK, entry.bytes - done))

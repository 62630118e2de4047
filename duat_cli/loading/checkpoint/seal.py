"""The check that a weight file is still the one whose header was checked: by size, modification time and header."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from duat_cli.loading.checkpoint.files import fail
from duat_cli.text import shown


@dataclass(frozen=True)
class Seal:
    """State of a file when it was checked."""

    size: int
    """Size of the file, bytes."""
    modified: int
    """Time of its last change, nanoseconds since 1970."""
    header_bytes: int
    """Bytes of the header, with the length in front of it."""
    header: str
    """sha256 of these bytes."""


def seal_of(file: BinaryIO, header_bytes: int) -> Seal:
    """The seal of an open file."""
    stat = os.fstat(file.fileno())
    return Seal(stat.st_size, stat.st_mtime_ns, header_bytes, _digest(file, header_bytes))


def require_unchanged(path: Path, seal: Seal, tensor: str | None, *, header: bool = False) -> None:
    """Refuses a file that is no longer the sealed one. tensor: what is read from it; header: whether to read the header
    again."""
    what = _change(path, seal, header)
    if what is not None:
        lost = "" if tensor is None else f"; tensor {shown(tensor)} is not read from it"
        fail(path, f"changed since it was checked, {what}{lost}: run again when nothing writes to it")


def _change(path: Path, seal: Seal, header: bool) -> str | None:
    try:
        stat = path.stat()
        if stat.st_size != seal.size:
            how = "shorter" if stat.st_size < seal.size else "longer"
            return f"it became {how} ({seal.size} bytes, now {stat.st_size})"
        if stat.st_mtime_ns != seal.modified:
            return "it was written to or replaced (its modification time is another)"
        if header:
            with path.open("rb") as file:
                return None if _digest(file, seal.header_bytes) == seal.header else "its header is another"
    except OSError as error:
        return f"it cannot be read any more ({error.strerror or error})"
    return None


def _digest(file: BinaryIO, count: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(count)).hexdigest()

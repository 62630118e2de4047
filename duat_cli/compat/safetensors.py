"""safetensors: known to work with 0.5 and 0.8."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any


def is_full_disk(fault: Exception) -> bool:
    """Whether a file could not be written for want of space: the system's error is a text in an error of its own."""
    return f"(os error {errno.ENOSPC})" in str(fault)


def open_read(path: Path) -> Any:
    """A file to read tensors from, read and not mapped: a mapped file that shrinks kills the process with SIGBUS.

    The argument `backend` is new in 0.8; an older safetensors can only map.
    """
    from safetensors import safe_open

    try:
        return safe_open(str(path), framework="pt", backend="pread")
    except TypeError:
        return safe_open(str(path), framework="pt")

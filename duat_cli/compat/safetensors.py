"""safetensors: known to work with 0.5 and 0.8."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_read(path: Path) -> Any:
    """A file to read tensors from, read and not mapped: a mapped file that shrinks kills the process with SIGBUS.

    The argument `backend` is new in 0.8; an older safetensors can only map.
    """
    from safetensors import safe_open

    try:
        return safe_open(str(path), framework="pt", backend="pread")
    except TypeError:
        return safe_open(str(path), framework="pt")

"""safetensors: known to work with 0.5 and 0.8."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def system_error(fault: Exception) -> OSError | None:
    """The system's error by which a file could not be written, which safetensors puts as a text into one of its own;
    None of another fault."""
    found = re.search(r"\(os error (\d+)\)", str(fault))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def open_read(path: Path) -> Any:
    """A file to read tensors from, read and not mapped: a mapped file that shrinks kills the process with SIGBUS.

    The argument `backend` is new in 0.8; an older safetensors can only map.
    """
    from safetensors import safe_open

    try:
        return safe_open(str(path), framework="pt", backend="pread")
    except TypeError:
        return safe_open(str(path), framework="pt")

"""safetensors: known to work with 0.5 and 0.8."""

from __future__ import annotations

import os
import re


def system_error(fault: Exception) -> OSError | None:
    """The system's error because of which a file could not be written, which safetensors includes as text in its own
    error; None for another error."""
    found = re.search(r"\(os error (\d+)\)", str(fault))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))

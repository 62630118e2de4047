"""How many processes may share a command's prompts."""

from __future__ import annotations

import os
import sys


def processes() -> int:
    """As many as torch would take threads. 1 where the fork of a process that has used torch is not known to be sound,
    which is everywhere but on Linux."""
    if sys.platform != "linux":
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else len(os.sched_getaffinity(0))

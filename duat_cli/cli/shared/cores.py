"""How many processes may share a command's prompts."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor time in a period, the period


def processes() -> int:
    """As many as torch would take threads: OMP_NUM_THREADS, else all cores that the container's quota pays for. 1 where
    the fork of a process that has used torch is not known to be sound, which is everywhere but on Linux."""
    if sys.platform != "linux":
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else min(len(os.sched_getaffinity(0)), _paid())


def _paid() -> int:
    """Cores by the quota of control groups, version 2; as many as there could be where there is none."""
    with contextlib.suppress(OSError, ValueError):  # 'max' is no number
        most, period = map(int, QUOTA.read_text().split())
        return max(1, math.ceil(most / period))
    return sys.maxsize

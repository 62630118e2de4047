"""Memory that is left and memory that was used; and whether a model's weights fit, checked before they are read,
because otherwise the system would kill the process."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import psutil

from duat_cli.compat.libc import resident_memory
from duat_cli.loading.checkpoint.dtypes import SHORT, SIZES, auto_dtype
from duat_cli.loading.checkpoint.files import fail
from duat_cli.loading.checkpoint.preflight import CheckpointFiles

_GIB = 1 << 30


def weight_bytes(files: CheckpointFiles, dtype: str) -> int:
    """Bytes of all weights as `dtype` ('auto': as stored)."""
    elements = sum(t.elements for t in files.tensors.values())
    if dtype == "auto":
        return elements * SIZES[auto_dtype(files)] if files.quantised else files.total_bytes
    return elements * SIZES[SHORT.get(dtype, dtype)]


def require_memory(files: CheckpointFiles, dtype: str) -> None:
    """CheckpointError where the weights alone, as `dtype` ('auto': as stored), take more memory than is left."""
    needed, left = weight_bytes(files, dtype), available_memory()
    if needed <= left:
        return
    auto = weight_bytes(files, "auto")
    stored = f"--dtype auto takes {auto / _GIB:.2f} GiB, " if auto < needed else ""
    fail(
        files.path,
        f"needs {needed / _GIB:.2f} GiB for its weights as {dtype}, has {left / _GIB:.2f} GiB of memory: {stored}"
        "duat check --weights-only takes next to none, and inspect, verify, matrix, check, lora-diff "
        "and prune-bound read weights block by block",
    )


def memory_limit() -> int:
    """Bytes that this process may use in total."""
    return int(available_memory()) + resident_memory()


def own_memory() -> int:
    """The most bytes so far, about, that a forked process does not share with its parent; 0 where the system does not
    say."""
    status = _fields(Path("/proc/self/status"))
    freed = status.get("VmHWM", 0) - status.get("VmRSS", 0)
    return 1024 * (_fields(Path("/proc/self/smaps_rollup")).get("Private_Dirty", 0) + freed)


def available_memory() -> float:
    """Bytes that this process can still get: the least of what the system, `ulimit -v` and the container leave."""
    return min(psutil.virtual_memory().available + psutil.swap_memory().free, _of_limit(), _of_container())


def peak_memory() -> int:
    """Peak resident memory of this process, bytes.

    ru_maxrss, used where nothing better is known, includes the process that started this one: Linux carries the
    parent's peak through fork and exec.
    """
    peak = _fields(Path("/proc/self/status")).get("VmHWM")
    if peak is not None:
        return 1024 * peak
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # macOS counts in bytes, other systems in KiB


def _of_limit() -> float:
    """Bytes left of `ulimit -v`; mapped files count as used."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return max(0, limit - 1024 * _fields(Path("/proc/self/status")).get("VmSize", 0))
    return math.inf


def _of_container() -> float:
    """Bytes left of the control group's limit; cached files that can be dropped count as free."""
    with contextlib.suppress(OSError, ValueError):
        root = Path("/sys/fs/cgroup")
        limit = (root / "memory.max").read_text().strip()
        if limit != "max":
            used = int((root / "memory.current").read_text())
            droppable = _fields(root / "memory.stat").get("inactive_file", 0)
            return max(0, int(limit) - used + droppable)
    return math.inf


def _fields(path: Path) -> dict[str, int]:
    """The numbers in lines such as 'Name: 12 kB' or 'name 12', by name."""
    found = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found

"""Memory of the process, and glibc's allocator, known to work with 2.36. With another C library nothing is changed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import psutil

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # constants of malloc.h
_LARGE = 1 << 20
"""Bytes; blocks of at least this size are given back to the system."""
_SMALL = 128 << 10
"""The same, while all weights of a model are read: glibc's own first value."""
LARGEST = 256 << 20
"""Bytes; smaller blocks are kept. Probes of a prompt's logits and gradients of many probes are smaller."""
ENOUGH = 512 << 20
"""Bytes of free memory at the heap's end that are not given back."""
AHEAD = 128 << 20
"""Bytes that the heap grows by at a time, and keeps where it gives back."""
GROWN = 32 << 20
"""Bytes by which a process may grow through free memory between the blocks that waiting passes hold."""


_asked: dict[int, int] = {}
"""What this process was last set to; empty where it is as the system has it."""


def _set(wanted: dict[int, int]) -> bool:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another system, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        return sum(mallopt(name, value) for name, value in wanted.items()) == len(wanted)
    return False


def _ask(wanted: dict[int, int]) -> bool:
    _asked.update(wanted)
    return _set(wanted)


def return_freed_memory() -> bool:
    """Makes the C library give large blocks back to the system once they are freed; returns whether it does so.

    By default glibc raises the size from which it does so, up to 32 MiB, with every block that is freed. Weights that
    come and go then leave holes: a streamed `inspect` of 1.1B parameters took 1.0 to 1.3 GiB, with this always 0.8.
    """
    return _ask({_M_MMAP_THRESHOLD: _LARGE})


@contextlib.contextmanager
def small_blocks_returned() -> Iterator[None]:
    """While all weights of a model are read, gives smaller blocks back too, in a process that gives back large ones.

    Matrices of single experts may be smaller than 1 MiB. They are freed once they are merged, between tensors that
    stay, so that a mixtral of 12 layers of 32 experts of 512 x 256 took 1.40 GiB, with this 1.01.
    """
    returns = _asked.get(_M_MMAP_THRESHOLD) == _LARGE
    if returns:
        _set({_M_MMAP_THRESHOLD: _SMALL})
    try:
        yield
    finally:
        if returns:
            _set({_M_MMAP_THRESHOLD: _LARGE})


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory and use it again; returns whether it does so.

    glibc returns freed blocks above a threshold to the system, and gets the next one of that size page by page, each
    zeroed by the system. Where the same sizes come and go for every prompt and every ablation, that takes a third of
    the time of `prune-bound`.
    """
    return _ask({_M_MMAP_THRESHOLD: LARGEST, _M_TRIM_THRESHOLD: ENOUGH, _M_TOP_PAD: AHEAD})


def give_back_free_memory() -> None:
    """Frees objects that only cycles refer to, and makes the C library give back the free pages of its heaps now.

    Discovery leaves small tensors of each block in such cycles: 1.3 MiB a block of a llama shape of 135M parameters.
    """
    gc.collect()
    give_back_free_pages()


def resident_memory() -> int:
    """Resident memory of this process now, bytes."""
    return psutil.Process().memory_info().rss


class Holes:
    """Free memory between the blocks that waiting passes still hold. If it is given back, its next use costs a fault a
    page, a tenth of the time where blocks are small; so it is given back only where the process has grown much."""

    def __init__(self) -> None:
        self._least = 0  # bytes resident, at the last giving back or since

    def close(self) -> None:
        """Gives back free pages, if the process has grown by more than `GROWN` since it last did."""
        resident = resident_memory()
        if resident > self._least + GROWN:
            give_back_free_pages()
            self._least = resident_memory()
        else:
            self._least = min(self._least, resident)


def give_back_free_pages() -> None:
    """Makes the C library give back the free pages of its heaps now, of every thread."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

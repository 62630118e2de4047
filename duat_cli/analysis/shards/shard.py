"""A shard: the file that one process appends its results to, in whole lines."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.errors import InputError

PATIENCE = 2.0  # seconds to wait for the lock, as a process that checks whether a shard is in use holds it briefly


class Shard:
    """An open shard, to which only this process appends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._end = _whole(descriptor)
        os.ftruncate(descriptor, self._end)

    def append(self, line: bytes) -> None:
        """Appends a line, or nothing of it where the disk is full, which raises InputError. If the process is killed
        meanwhile, the line is seen to be cut off."""
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise InputError(
                f"{self._path}: cannot write: {error.strerror}; run again, what is there is kept"
            ) from error
        self._end += len(line)


@contextlib.contextmanager
def shard(path: Path, ranks: Ranks) -> Iterator[Shard]:
    """A context with the shard, created if missing, and without a last line that was cut off. Raises InputError while
    another process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise InputError(f"{path}: cannot write: {error.strerror}") from error
    try:
        if not _taken(path, descriptor):
            raise InputError(f"{path}: another process is writing it as {ranks}; give every process a rank of its own")
        yield Shard(path, descriptor)
    finally:
        os.close(descriptor)  # also frees the lock


def is_held(path: Path) -> bool:
    """Whether a running process is writing the shard."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _locked(path, descriptor, alone=False)
    finally:
        os.close(descriptor)


def _taken(path: Path, descriptor: int) -> bool:
    end = time.monotonic() + PATIENCE
    while not _locked(path, descriptor, alone=True):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _locked(path: Path, descriptor: int, alone: bool) -> bool:
    """Tries to take the lock; whether it did. The lock ends with the descriptor, and so with the process."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:  # Windows has another kind of locks, some network file systems none
        raise InputError(f"{path}: cannot be locked: {getattr(error, 'strerror', None) or error}") from error
    return True


def _whole(descriptor: int) -> int:
    """Offset of the end of the last whole line."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - (1 << 16))
        os.lseek(descriptor, start, os.SEEK_SET)
        found = os.read(descriptor, end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

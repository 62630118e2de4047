"""Processes that share the prompts of a command: how many there may be, and the work of one of them with `--out`."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from duat_cli.cli.shared.presentation import announce
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import DuatError, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.opening import PromptRequest
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.cli.terminal.talk import Talk


OBJECTS = 20_000  # allocated between two garbage collections; those of a batch are gone by then
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's microseconds of processor time in a period, and the period
R = TypeVar("R")


def settle() -> None:
    """Prepares a process that will run many prompts over weights in memory: excludes the present objects from garbage
    collection, makes it rarer, and keeps freed memory, as every batch makes objects and tensors of the same sizes.
    Garbage collection took a tenth of the time on a small model."""
    import gc

    from duat_cli.compat.libc import keep_freed_memory

    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(OBJECTS)


def as_rank(
    model: str | None, texts: PromptRequest, compute: Callable[[Ranks, Progress], R | None], talk: Talk
) -> R | None:
    """The report of a command with --out, in the first of all processes; None in the others, whose errors name their
    rank. compute: writes this process's results to the folder and returns the report, if any."""
    if importlib.util.find_spec("fcntl") is None:
        raise InputError("--out: results are kept under file locks that Windows does not have; run duat in WSL")
    from duat_cli.analysis.shards.ranks import Ranks

    ranks = Ranks.of()
    if ranks.world > 1 and "-" in (texts.file, *(texts.prompts or ())):
        raise InputError("standard input is read by one process; give --prompts a file that all can read")
    talk = talk if ranks.first else replace(talk, quiet=True, verbose=False)
    announce(model, talk)
    try:
        with Progress(talk) as progress:
            return compute(ranks, progress)
    except DuatError as error:
        if ranks.first:
            raise
        raise type(error)(f"{ranks}: {error}") from error


def processes() -> int:
    """Number of processes: as many as torch would use threads, which is OMP_NUM_THREADS, else all cores within the
    container's quota; 1 except on Linux, as elsewhere the fork of a process that has used torch may be unsound."""
    if sys.platform != "linux":
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else min(len(os.sched_getaffinity(0)), _paid())


def _paid() -> int:
    """Cores within the quota of control groups, version 2; sys.maxsize where there is no quota."""
    with contextlib.suppress(OSError, ValueError):  # 'max' stands for no quota
        most, period = map(int, QUOTA.read_text().split())
        return max(1, math.ceil(most / period))
    return sys.maxsize

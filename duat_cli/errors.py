"""The errors that duat raises, and the exit code of each kind.

Every message is one line: what, where, expected, got, and the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_SOUND = 0
EXIT_FINDINGS = 1
EXIT_UNDECIDED = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class DuatError(Exception):
    """An error the user can act on; its text is one line. Exit code 2: duat could not tell."""

    exit_code = EXIT_UNDECIDED


class InputError(DuatError):
    """An option, a prompt or an output path that cannot be used."""


class CheckpointError(DuatError):
    """A checkpoint that cannot be read, or whose files contradict each other."""


class UnsupportedModelError(DuatError):
    """A model whose DUAT form duat cannot prove; the text says which part and why."""


class ForwardError(CheckpointError):
    """A model whose own forward pass fails, without any part of duat in it."""


class NoSignalError(UnsupportedModelError):
    """A model whose hidden states are zero: the certificate is relative to them, so it is not defined."""


class NotFiniteError(UnsupportedModelError):
    """A model that puts out NaN or infinite values: nothing can be measured relative to them."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. torch raises kinds of its own; on the CPU a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def or_reason(work: Callable[[], T]) -> T | str:
    """The result of `work`, or the reason of its UnsupportedModelError."""
    try:
        return work()
    except UnsupportedModelError as reason:
        return str(reason)


def needed(value: T | None) -> T:
    """A value that is never None here, because of what was requested or done before."""
    assert value is not None
    return value

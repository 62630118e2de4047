"""What a child process of a test needs."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable

PATIENCE = 300  # seconds for a child process, however busy the machine: only a hang takes longer


def hear_signals() -> None:
    """A shell's background job, which may run these tests, ignores interrupts, and its children would as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def forked(action: Callable[..., object], *given: object) -> int | None:
    """The exit code of a fork of this process that does this: it imports nothing anew, and leaves nothing here."""
    child = multiprocessing.get_context("fork").Process(target=action, args=given)
    child.start()
    child.join(PATIENCE)
    return child.exitcode

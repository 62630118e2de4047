"""What a child process of a test needs."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from collections.abc import Callable

PATIENCE = 300  # seconds for a child process, however busy the machine: only a hang takes longer


def hear_signals() -> None:
    """A shell's background job, which may run these tests, ignores interrupts, and its children would as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def forked(action: Callable[..., object], *given: object) -> int | None:
    """The exit code of a fork of this process that does this: it imports nothing anew, and leaves nothing here."""
    child = multiprocessing.get_context("fork").Process(target=action, args=given)
    child.start()
    child.join(PATIENCE)
    return child.exitcode

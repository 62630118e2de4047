"""What a child process of a test needs."""

from __future__ import annotations

import signal

PATIENCE = 300  # seconds for a child process, however busy the machine: only a hang takes longer


def hear_signals() -> None:
    """A shell's background job, which may run these tests, ignores interrupts, and its children would as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

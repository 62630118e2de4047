"""What a child process of a test needs."""

from __future__ import annotations

import signal


def hear_signals() -> None:
    """A shell's background job, which may run these tests, ignores interrupts, and its children would as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

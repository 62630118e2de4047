"""SIGINT and SIGTERM as exceptions, so that `finally` clauses run and temporary files are deleted."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from duat_cli.errors import EXIT_INTERRUPTED, EXIT_TERMINATED


class Stopped(BaseException):
    """The user or the system asked duat to stop.

    It is no KeyboardInterrupt, which Typer would turn into a silent exit, and no Exception, which some library would
    swallow.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code


def install() -> None:
    """Makes the first signal raise Stopped and the second one kill. An ignored signal stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if number == signal.SIGTERM:
        raise Stopped("terminated", EXIT_TERMINATED)
    raise Stopped("interrupted", EXIT_INTERRUPTED)

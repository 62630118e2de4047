"""Progress of a command on standard error, once it takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from duat_cli.cli.terminal import streams
from duat_cli.cli.terminal.talk import Talk, redact
from duat_cli.text import about, one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PATIENCE = 2.0  # seconds before the first line
LONG = 60.0  # seconds from which a command's expected duration is announced
PAUSES = (8.0, 20.0, 30.0)  # seconds between plain lines; the last one repeats


class Progress:
    """A context manager to be called with (done, total, what). It writes from its own thread, so that a long step is
    named while it runs, not when it has ended.
    """

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._state = (0, 0, "starting")
        self._started = time.monotonic()
        self._expected: float | None = None
        self._over = threading.Event()
        self._speaker: threading.Thread | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self._state[2]:
            self._talk.detail(what)
        self._state = (done, total, what)

    def expect(self, seconds: float) -> None:
        """Announces how long everything will take, if that is long; the time spent is then shown beside it."""
        if seconds >= LONG:
            self._talk.note(f"this will take {about(seconds)}, as far as can be told")
            self._expected = seconds

    def doing(self, what: str) -> None:
        """Names a step of unknown length."""
        self(0, 0, what)

    def __enter__(self) -> Progress:
        if not self._talk.quiet and not self._talk.verbose:  # -v shows every step anyway
            self._speaker = threading.Thread(target=self._speak, name="duat-progress", daemon=True)
            self._speaker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._speaker is not None:
            self._speaker.join(timeout=2.0)

    def _speak(self) -> None:
        if self._over.wait(PATIENCE):
            return
        with contextlib.suppress(OSError, ValueError):
            if _is_live():
                self._speak_live()
            else:
                self._speak_lines()

    def _speak_lines(self) -> None:
        pauses = iter(PAUSES)
        pause = PAUSES[-1]
        while True:
            streams.say(redact(f"duat: {self.line()}"))
            pause = next(pauses, pause)
            if self._over.wait(pause):
                return

    def _speak_live(self) -> None:
        bar = _bar(color=self._talk.color)
        with bar:
            task = bar.add_task("", total=None)
            while not self._over.wait(0.1):
                self._show(bar, task)

    def _show(self, bar: Bar, task: TaskID) -> None:
        done, total, what = self._state
        what = one_line(what, 60) if self._expected is None else f"{one_line(what, 60)} ({self._spent()})"
        bar.update(task, completed=done, total=total or None, description=redact(what))

    def line(self) -> str:
        """The current state as one line."""
        done, total, what = self._state
        count = f" {done}/{total}" if total else ""
        return f"{one_line(what, 120)}{count} ({self._spent()})"

    def _spent(self) -> str:
        spent = time.monotonic() - self._started
        if self._expected is None:
            return f"{spent:.0f} s"
        if spent > self._expected:
            return f"{about(spent)} so far, {about(self._expected)} were expected"
        return f"{spent:.0f} s of {about(self._expected)}"


def _is_live() -> bool:
    from rich.console import Console

    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def _bar(color: bool) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, no_color=not color, markup=False, highlight=False)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

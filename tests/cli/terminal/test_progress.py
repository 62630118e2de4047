"""How long a command takes, said before and counted towards."""

from __future__ import annotations

import re
import time

import pytest

from duat_cli.analysis.progress import expect
from duat_cli.cli.terminal.progress import LONG, Progress
from duat_cli.cli.terminal.talk import Talk

TALK = Talk(quiet=False, verbose=False, color=False)


def test_what_is_long_is_said_and_counted_towards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(TALK)
    progress(3, 30, "block")
    expect(progress, LONG * 4)
    assert capsys.readouterr().err == "duat: this will take about 4 min, as far as can be told\n"
    assert re.fullmatch(r"block 3/30 \(\d+ s of about 4 min\)", progress.line())
    later = time.monotonic() + LONG * 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert progress.line() == "block 3/30 (about 6 min so far, about 4 min were expected)"


def test_what_is_not_long_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(TALK)
    expect(progress, LONG - 1)
    assert capsys.readouterr().err == ""
    assert "about" not in progress.line()


def test_a_progress_that_does_not_want_to_know() -> None:
    expect(lambda *_: None, 1e9)

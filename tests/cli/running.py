"""Running the command line with a faked analysis: here, or in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_duat
import pytest
from children import PATIENCE

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries, progress, talk

FAKE = str(Path(__file__).with_name("fake_duat.py"))
STEERING = {"COLUMNS", "NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "TERM", "HF_TOKEN", "DUAT_DEBUG"}


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    returncode: int
    stdout: str
    stderr: str


Duat = Callable[..., Outcome]


@pytest.fixture
def duat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Duat:
    """Run duat in this process; `fake` says what goes on inside, other keywords are environment variables."""
    for name, fake in fake_duat.FAKES.items():
        monkeypatch.setitem(sys.modules, name, fake)
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after
    monkeypatch.setattr(talk, "_given_tokens", set())
    monkeypatch.setattr(progress, "PATIENCE", 3600.0)  # a busy machine would let it speak

    def here(*arguments: str, fake: str = "", **env: str) -> Outcome:
        with monkeypatch.context() as settings:
            for name, value in {"COLUMNS": "80", "DUAT_FAKE": fake, **env}.items():
                settings.setenv(name, value)
            code = run(arguments)
        return Outcome(code, *capsys.readouterr())

    return here


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what steers a terminal, with some changes."""
    return {name: value for name, value in os.environ.items() if name not in STEERING} | changes


def command(*arguments: str) -> list[str]:
    """The command line of the fake duat in a process of its own."""
    return [sys.executable, FAKE, *arguments]


def apart(*arguments: str, fake: str = "", process: dict[str, Any] | None = None, **env: str) -> Outcome:
    """Run duat in a process of its own; `process` is for subprocess.run."""
    done = subprocess.run(
        command(*arguments),
        env=environment(DUAT_FAKE=fake, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **(process or {}),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)

"""Running the real command line, here or in a process of its own, and what each of its outputs must keep."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries, talk
from duat_cli.loading import prompts
from duat_cli.loading.checkpoint.source import demo_path

STEERING = {"COLUMNS", "NO_COLOR", "FORCE_COLOR", "CI", "PRE_COMMIT", "TERM", "HF_TOKEN", "DUAT_DEBUG"}


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout, parse_constant=pytest.fail)

    def refused(self, *words: str) -> None:
        """Exit code 2, no result but the error where JSON was asked for, one clean line with these words."""
        assert self.code == 2, self.text
        if self.stdout:
            assert self.json["verdict"] == "undecided"
            assert "duat: error: " + self.json["error"]["message"] in self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("duat: error: ")]
        assert len(lines) == 1, self.stderr
        assert "unexpected " not in lines[0].split("(")[0] or "unexpected tensor" in lines[0], lines[0]
        for word in words:
            assert word.lower() in lines[0].lower(), lines[0]

    def findings(self, status: str = "failed") -> list[dict[str, Any]]:
        return [o for o in self.json["outcomes"] if o["status"] == status]

    def rules(self, status: str = "failed") -> set[str]:
        return {o["rule"] for o in self.findings(status)}


Duat = Callable[..., Outcome]


@pytest.fixture
def duat(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Duat:
    """Run duat in this process; keywords are environment variables. What it may never do is asserted."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after
    monkeypatch.setattr(talk, "_given_tokens", set())
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)

    def here(*arguments: object, **env: str) -> Outcome:
        capfd.readouterr()
        with monkeypatch.context() as settings:
            for name, value in {"COLUMNS": "100", **env}.items():
                settings.setenv(name, value)
            code = run([str(a) for a in arguments])
        done = Outcome(code, *capfd.readouterr())
        assert code in (0, 1, 2), done.text
        assert "Traceback" not in done.text
        assert "\x1b" not in done.text
        return done

    return here


def apart(*arguments: object, process: dict[str, Any] | None = None, **env: str) -> Outcome:
    """Run duat in a process of its own, as it is installed; `process` is for subprocess.run."""
    settings = {name: value for name, value in os.environ.items() if name not in STEERING}
    done = subprocess.run(
        [sys.executable, "-m", "duat_cli", *map(str, arguments)],
        env={**settings, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **(process or {}),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def few_bundled(count: int, first: int = 0) -> Iterator[None]:
    """A context in which the bundled sets have so many prompts, from the first on."""
    bundled = prompts._bundled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_bundled", lambda name: bundled(name)[first : first + count])
        yield


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the bundled demo, to be damaged."""
    return Path(shutil.copytree(demo_path(), tmp_path / "demo"))

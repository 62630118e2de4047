"""How many processes may share the prompts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from duat_cli.cli.main import run
from duat_cli.cli.shared import many
from duat_cli.cli.shared.many import processes
from duat_cli.cli.terminal import libraries


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_as_many_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processes() == 3
    monkeypatch.setattr(many, "QUOTA", Path("nowhere"))
    for nothing in ("0", "", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", nothing)
        assert processes() == len(os.sched_getaffinity(0))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("", 8),
    ],
)
def test_no_more_than_a_container_pays_for(
    said: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text(f"{said}\n", encoding="ascii")
    monkeypatch.setattr(many, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes() == expected


def test_one_where_a_fork_is_not_known_to_be_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes() == 1


@pytest.mark.parametrize("command", ["inspect", "attribute", "prune-bound", "lora-diff"])
def test_without_file_locks_nothing_is_begun(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    assert run([command, "--prompt", "a", "--out", "kept"]) == 2
    assert "file locks that Windows does not have" in capsys.readouterr().err

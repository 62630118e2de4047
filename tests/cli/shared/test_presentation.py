"""The output file: checked early, whole or untouched."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from children import PATIENCE
from running import Duat, apart, command, environment

from duat_cli.cli.shared.presentation import Target
from duat_cli.errors import InputError


@pytest.mark.parametrize("option", ["--output", "--matrices"])
@pytest.mark.parametrize("name", ["", "missing/r.json", "r" * 300])
def test_target_is_checked_before_computing(duat: Duat, tmp_path: Path, option: str, name: str) -> None:
    result = duat("inspect", "m", option, str(tmp_path / name), fake="crash")
    assert result.returncode == 2
    assert result.stderr.startswith(f"duat: error: {option} ")
    assert list(tmp_path.iterdir()) == []


def test_format_follows_the_file_name(duat: Duat, tmp_path: Path) -> None:
    duat("inspect", "m", "-o", str(tmp_path / "r.json"))
    duat("inspect", "m", "-o", str(tmp_path / "r.txt"))
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "inspect"
    assert "eff." in (tmp_path / "r.txt").read_text()
    result = duat("inspect", "m", "-o", "-")
    assert "eff." in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify", "support"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.bin", "X.PT", "x.json.gz"])
def test_a_report_gets_no_name_of_tensors(duat: Duat, tmp_path: Path, command: str, name: str) -> None:
    result = duat(command, "m", "-o", str(tmp_path / name), "--json", fake="crash")
    assert result.returncode == 2
    assert "a report is text" in result.stderr
    assert "'duat inspect --matrices FILE'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["report", "report.v2", "r.log", "r.csv", ".hidden"])
def test_other_names_are_the_users_own(duat: Duat, tmp_path: Path, name: str) -> None:
    assert duat("inspect", "m", "-o", str(tmp_path / name)).returncode == 0
    assert "eff." in (tmp_path / name).read_text()


def test_failure_leaves_the_old_file(duat: Duat, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text("old")
    assert duat("inspect", "m", "-o", str(file), fake="crash").returncode == 2
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_file_size_limit_leaves_the_old_file(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    file = tmp_path / "r.json"
    file.write_text("old")
    result = apart("inspect", "m", "-o", str(file), process={"preexec_fn": limit})
    assert result.returncode == 2, result.stderr
    assert str(file) in result.stderr
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_two_at_once_leave_one_whole_report(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    line = command("inspect", "m", "-q", "-o", str(file))
    runs = [subprocess.Popen(line, env=environment(DUAT_FAKE="big")) for _ in range(2)]
    assert [run.wait(timeout=PATIENCE) for run in runs] == [0, 0]
    assert json.loads(file.read_text())["command"] == "inspect"
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_is_written_to_the_working_folder(duat: Duat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    assert duat("inspect", "m").returncode == 0


def test_link_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    Target.of("--output", str(link)).write("new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        Target.of("--output", str(tmp_path / "r")).write("x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o640


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    Target.of("--output", str(pipe)).write("through")
    assert reader.communicate(timeout=PATIENCE)[0] == "through"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_device_is_named() -> None:
    with pytest.raises(InputError, match=r"--output '/dev/full': cannot write: No space left"):
        Target.of("--output", "/dev/full").write("x" * 10000)

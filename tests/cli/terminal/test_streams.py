"""Signals, closed and full streams, pipes, encodings, narrow terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import PATIENCE as CHILD
from children import hear_signals
from running import Duat, apart, command, environment

from duat_cli.cli.terminal.progress import PATIENCE
from duat_cli.cli.terminal.streams import write_result


def shell(script: str, fake: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """A bash line in which $D is the fake duat."""
    settings = environment(DUAT_FAKE=fake, D=" ".join(command()), **env)
    return subprocess.run(
        ["bash", "-c", script], env=settings, capture_output=True, text=True, timeout=CHILD, check=False
    )


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signals(tmp_path: Path, number: signal.Signals, code: int, word: str) -> None:
    report = tmp_path / "r.json"
    report.write_text("old")
    line = command("inspect", "m", "-o", str(report))
    run = subprocess.Popen(
        line,
        env=environment(DUAT_FAKE="slow"),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,  # noqa: PLW1509
    )
    assert run.stderr is not None
    assert run.stderr.readline() == "computing\n"
    run.send_signal(number)
    _, rest = run.communicate(timeout=CHILD)  # the fake would compute for an hour
    assert run.returncode == code
    assert rest == f"duat: {word}\n"
    assert report.read_text() == "old"
    assert list(tmp_path.iterdir()) == [report]


def test_an_interrupt_while_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    stopped = subprocess.run(
        [sys.executable, "-m", "duat_cli", "--help"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=CHILD,
        check=False,
        preexec_fn=hear_signals,
    )
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "duat: interrupted\n")


@pytest.mark.parametrize("arguments", ["inspect m", "--help", "--version"])
def test_full_standard_output(arguments: str) -> None:
    result = shell(f"$D {arguments} > /dev/full")
    assert result.returncode == 2
    assert "standard output" in result.stderr
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_full_standard_error_does_not_matter() -> None:
    assert shell("$D inspect 2> /dev/full").returncode == 0


@pytest.mark.parametrize(("fake", "code"), [("big", "0"), ("big,inexact", "1")])
def test_broken_pipe_keeps_the_verdict(fake: str, code: str) -> None:
    result = shell("$D inspect m --json | head -1 > /dev/null; echo ${PIPESTATUS[0]}", fake=fake)
    assert result.stdout.strip() == code
    assert result.stderr == ""


def test_broken_pipe_of_help() -> None:
    result = shell("(sleep 1.2; exec $D inspect --help) | true; echo ${PIPESTATUS[0]}")
    assert result.stdout.strip() == "0"
    assert result.stderr == ""


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams(tmp_path: Path, closing: str) -> None:
    report = tmp_path / "r.json"
    result = shell(f"$D inspect -o {report} {closing}", fake="inexact")
    assert result.returncode == 1, result.stderr
    assert json.loads(report.read_text())["command"] == "inspect"


def test_closed_standard_output_without_a_file() -> None:
    assert shell("$D inspect m >&-", fake="inexact").returncode == 1


@pytest.mark.parametrize("arguments", [("inspect", "mödel"), ("inspect", "--help")])
def test_ascii_terminal(arguments: tuple[str, ...]) -> None:
    result = apart(*arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    if "mödel" in arguments:
        assert result.stdout.startswith("m\\udcc3\\udcb6del")  # as Python hands over bytes that C cannot read


def test_a_document_is_in_the_encoding_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252", errors="backslashreplace"))
    for text in ('<?xml version="1.0" encoding="utf-8"?>\n<a>modèle Ω</a>\n', "modèle Ω\n"):
        write_result(text)
    document, plain = raw.getvalue().rsplit(b"</a>", 1)
    assert document.decode("utf-8").endswith("modèle Ω")
    assert plain.split()[0].decode("cp1252") == "modèle"


def test_narrow_and_dumb(duat: Duat) -> None:
    result = duat("inspect", "m", COLUMNS="20", TERM="dumb", NO_COLOR="1")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout + result.stderr
    assert max(map(len, result.stdout.split("\n"))) <= 20


def test_odd_names_are_shown_as_they_are(duat: Duat) -> None:
    result = duat("inspect", "m[bold]x[/red]\x1b[31m\u202e\ny")
    assert result.returncode == 0
    assert "m[bold]x[/red]\\x1b[31m\\u202e\\ny" in result.stdout
    assert "[bold]warning[/bold]" in result.stdout
    assert "\x1b" not in result.stdout


def on_terminal(*arguments: str, fake: str = "", on_more: Callable[[bytes], None] | None = None, **env: str) -> str:
    """What a terminal gets. on_more: called with everything so far, whenever there is more."""
    parent, child = pty.openpty()
    settings = environment(DUAT_FAKE=fake, TERM="xterm", COLUMNS="80", **env)
    run = subprocess.Popen(command(*arguments), env=settings, stdin=child, stdout=child, stderr=child)
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
        if on_more is not None:
            on_more(seen)
    os.close(parent)
    assert run.wait(timeout=CHILD) == 0
    return seen.decode()


def test_color_is_for_terminals(duat: Duat) -> None:
    assert "\x1b[32mexact" in on_terminal("inspect", "m")
    assert "\x1b" not in on_terminal("inspect", "m", "--no-color")
    assert "\x1b" not in on_terminal("inspect", "m", NO_COLOR="1")
    assert "\x1b" not in duat("inspect", "m", FORCE_COLOR="1").stdout


def test_progress_is_for_what_takes_over_two_seconds(duat: Duat) -> None:
    assert PATIENCE == 2.0
    assert duat("inspect", "m").stderr == ""


def test_progress_names_what_takes_long_line_by_line(tmp_path: Path) -> None:
    """The fake goes on once its step has been named."""
    go = tmp_path / "go"
    settings = environment(DUAT_FAKE="pause", DUAT_FAKE_UNTIL=str(go))
    pipe = subprocess.PIPE
    run = subprocess.Popen(command("inspect", "m"), env=settings, stdout=pipe, stderr=pipe, text=True)
    assert run.stderr is not None
    line = run.stderr.readline()
    while line and "three" not in line:
        line = run.stderr.readline()
    go.touch()
    assert re.fullmatch(r"duat: block \\x1b\[31mthree 3/30 \(\d+ s\)\n", line)
    run.communicate(timeout=CHILD)
    assert run.returncode == 0


def test_progress_names_what_takes_long_on_a_terminal(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def seen(text: bytes) -> None:
        if b"block \\x1b[31mthree" in text and b"3/30" in text:
            go.touch()

    on_terminal("inspect", "m", fake="pause", on_more=seen, DUAT_FAKE_UNTIL=str(go))
    assert go.exists()

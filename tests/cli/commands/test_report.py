"""`duat report`, and the forms of the output options that a page adds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
from unpacking import reports_in

from duat_cli.api.words import page_of
from duat_cli.cli.commands.report import MOST_BYTES, read_report
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.report.json import to_json
from duat_cli.results.inspect import InspectReport


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "saved.json"
    file.write_text(to_json(sample.inspect_report()), encoding="utf-8")
    return file


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused."""
    assert run(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def changed(file: Path, **fields: Any) -> Path:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}), encoding="utf-8")
    return file


def test_a_saved_report_gives_the_page_of_its_run(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes, from the run and from its JSON."""
    shown, kept = tmp_path / "report.html", tmp_path / "report.json"
    given = ["inspect", str(short / "demo"), "--prompt", "def f(x):", "--null", "uniform", "-q"]
    assert run([*given, "-o", str(shown)]) == 0
    assert run([*given, "--maps", "1", "--json", "-o", str(kept)]) == 0
    report = read_report(str(kept))
    assert isinstance(report, InspectReport)
    assert report.maps is not None
    assert run(["report", str(kept), "-q", "-o", str(tmp_path / "again.html")]) == 0
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again == page_of([(None, report)])
    ran = reports_in(shown.read_text(encoding="utf-8"))
    assert ran[0]["report"]["maps"] == report.model_dump(mode="json")["maps"]
    assert len(again) == pytest.approx(shown.stat().st_size, abs=200)  # time and memory of the run differ
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "given",
    [("plan",), ("matrix", "--max-tokens", "4"), ("matrix", "--network", "--max-tokens", "4"), ("compare",)],
    ids=" ".join,
)
def test_a_command_writes_its_page(
    given: tuple[str, ...], short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, (command, *options) = tmp_path / "report.html", given
    assert run([command, str(short / "demo"), *options, "-q", "-o", str(page)]) == 0
    assert capsys.readouterr().out == ""
    (held,) = reports_in(page.read_text(encoding="utf-8"))
    (tmp_path / "saved.json").write_text(json.dumps(held["report"]), encoding="utf-8")
    report = read_report(str(tmp_path / "saved.json"))
    assert page.read_text(encoding="utf-8") == page_of([(None, report)])


def test_matrix_writes_matrices_beside_its_page(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FILE that ends in .safetensors stays that of W'; any other one holds the page."""
    given = ["matrix", str(short / "demo"), "--max-tokens", "4", "-q", "--format", "html"]
    assert run([*given, "-o", str(tmp_path / "w.safetensors")]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert (tmp_path / "w.safetensors").stat().st_size > 1000
    assert run([*given, "-o", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "--dense" in refusal(capsys, *given, "--dense", "-o", str(tmp_path / "page"))
    assert ".safetensors" in refusal(capsys, "matrix", "--json", "-o", str(tmp_path / "x.html"))


@pytest.mark.parametrize("given", [("inspect", "--null", "uniform"), ("attribute",)], ids=" ".join)
def test_merge_writes_the_page_of_the_command(given: tuple[str, ...], short: Path, tmp_path: Path) -> None:
    kept, page, plain = tmp_path / "kept", tmp_path / "merged.html", tmp_path / "plain.html"
    command, *options = given
    asked = [command, str(short / "demo"), *options, "--prompt", "def f(x):", "-q"]
    assert run([*asked, "--out", str(kept)]) == 0
    assert run(["merge", str(kept), "-q", "-o", str(page)]) == 0
    assert run([*asked, "--json", "-o", str(tmp_path / "plain.json")]) == 0
    assert run(["report", str(tmp_path / "plain.json"), "-q", "-o", str(plain)]) == 0
    shown = [file.read_text(encoding="utf-8").partition('<script type="application/zlib"')[0] for file in (page, plain)]
    assert shown[0] == shown[1]
    assert f"duat {given[0]}" in shown[0]


@pytest.mark.parametrize("command", ["inspect", "attribute"])
def test_the_demo_page_is_small(command: str, tmp_path: Path) -> None:
    """Below 300 kB with the bundled prompts, and its JSON is whole."""
    page = tmp_path / "report.html"
    assert run([command, "-q", "-o", str(page)]) == 0
    assert 50_000 < page.stat().st_size <= 300_000
    (held,) = reports_in(page.read_text(encoding="utf-8"))
    assert held["left_out"] == []
    assert len(held["report"]["prompts"]) == 15


def test_a_page_goes_to_a_pipe_and_not_to_a_terminal(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["report", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "-o report.html" in refusal(capsys, "report", str(saved))
    assert "-o report.html" in refusal(capsys, "inspect", "--format", "html")


def test_forms_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "contradict" in refusal(capsys, "inspect", "--json", "--format", "html")


def test_maps_are_drawn_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--maps" in refusal(capsys, "inspect", "--out", str(tmp_path / "kept"), "--maps", "1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("no JSON",)),
        (b"not json", ("no JSON", "--json")),
        (b"\xff\xfe", ("no JSON",)),
        (b"[1, 2]", ("no report of duat",)),
        (b'{"schema_version": 2, "command": "inspect"}', ("no report of duat",)),
        (b'{"a": NaN}', ("no JSON", "NaN")),
        (b"[" * 100_000, ("too deep",)),
        (b'{"schema_version": "3", "command": "inspect", "duat_version": "9.9"}', ("version 3", "9.9", "update")),
        (b'{"schema_version": "1", "command": "inspect"}', ("version 1", "again")),
        (b'{"schema_version": "\\u001b[31m", "command": "inspect"}', ("\\x1b",)),
        (b'{"schema_version": "2", "command": "<b>"}', ("<b>",)),
        (b'{"schema_version": "2", "command": "explain"}', ("no page", "inspect")),
        (b'{"schema_version": "2", "command": "inspect"}', ("duat_version", "Field required")),
    ],
)
def test_what_is_no_report_is_one_line(
    content: bytes, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    line = refusal(capsys, "report", str(file))
    assert "x.json" in line
    for word in words:
        assert word in line


def test_a_report_with_a_wrong_field_names_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "blocks" in refusal(capsys, "report", str(changed(saved, blocks=3)))


def test_a_report_whose_fields_contradict_each_other_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is what it should be, and together they cannot be shown; that is no fault of this duat's."""
    file = tmp_path / "saved.json"
    report = json.loads(to_json(sample.attribute_report()))
    del report["attribution"][0]["parts"]["tokens"][0]
    file.write_text(json.dumps(report), encoding="utf-8")
    assert "no whole report of duat: its fields do not fit together (" in refusal(capsys, "report", str(file))
    report = json.loads(to_json(sample.inspect_report()))
    report["blocks"][1]["null"]["uniform"]["density"]["numerical"] = 1e308
    file.write_text(json.dumps(report), encoding="utf-8")
    assert "no whole report of duat: its fields do not fit together (" in refusal(capsys, "report", str(file))


def test_a_missing_and_a_huge_file_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refusal(capsys, "report", str(tmp_path / "none.json"))
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(200 << 20)  # a hole: it takes no room
    assert "200 MiB" in refusal(capsys, "report", str(huge))


def test_the_limit_holds_what_a_large_run_writes() -> None:
    """80 blocks x 15 prompts with --per-prompt is read."""
    one = len(to_json(sample.inspect_report(per_prompt=True))) / 4 / 2  # of a block and prompt
    assert 80 * 15 * one < MOST_BYTES

"""The command's own options: forms, reports beside the result, and what contradicts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import bad_checkpoints as bad
import pytest
from running_checks import Duat

LIGHT = ("--weights-only", "-q")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    bad.build("w_nan", tmp_path / "m")
    return tmp_path / "m"


def test_the_form_follows_the_file_name(broken: Path, tmp_path: Path, duat: Duat) -> None:
    for name in ("r.json", "r.xml", "r.md", "r.sarif", "r.txt"):
        assert duat("check", broken, *LIGHT, "-o", tmp_path / name).code == 1
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "failed"
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("failures") == "1"
    assert (tmp_path / "r.md").read_text().startswith("## duat check")
    assert json.loads((tmp_path / "r.sarif").read_text())["version"] == "2.1.0"
    assert "FAILED: 1 cause, " in (tmp_path / "r.txt").read_text()


def test_several_reports_of_one_run(broken: Path, tmp_path: Path, duat: Duat) -> None:
    wanted = {form: tmp_path / f"r_{form}" for form in ("table", "json", "junit", "github", "markdown", "sarif")}
    options = [part for form, file in wanted.items() for part in ("--report", f"{form}={file}")]
    done = duat("check", broken, *LIGHT, "--format", "github", *options)
    assert done.code == 1
    assert done.stdout == wanted["github"].read_text()
    assert "integrity.nonfinite" in done.stdout
    assert all("integrity.nonfinite" in file.read_text() for file in wanted.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--json", "--format", "sarif"), ("--json", "sarif")),
        (("--format", "xml"), ("xml",)),
        (("--report", "sarif"), ("FORMAT=FILE",)),
        (("--report", "pdf=x"), ("pdf=x", "junit")),
        (("--report", "json=-"), ("FORMAT=FILE",)),
        (("--report", "json=a", "-o", "a"), ("named twice",)),
        (("--baseline", "b.json", "--update-baseline", "-o", "b.json"), ("named twice",)),
        (("--adapter", "nope"), ("nope", "no such folder")),
        (("--prompts", "nope.txt"), ("--weights-only and --prompts contradict", "leave one of them out")),
        (("--prompt", "a"), ("--weights-only and --prompt contradict",)),
        (("--chat",), ("--weights-only and --chat contradict",)),
        (("--max-tokens", "3"), ("--weights-only and --max-tokens contradict",)),
        (("--image", "a.png"), ("--weights-only and --image contradict",)),
    ],
)
def test_options_that_cannot_be_meant(
    options: tuple[str, ...],
    words: tuple[str, ...],
    broken: Path,
    tmp_path: Path,
    duat: Duat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    duat("check", broken, *LIGHT, *options).refused(*words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_weights_alone_wait_for_no_library(broken: Path, tmp_path: Path) -> None:
    """Nor where the report takes the place of an older one, which may be no file that is read."""
    report = tmp_path / "r.json"
    report.write_text("old")
    code = (
        "import sys\nfrom duat_cli.cli.main import run\n"
        f"code = run(['check', {str(broken)!r}, '--weights-only', '-q', '--json', '-o', {str(report)!r}])\n"
        "print(code, [m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "1 []"


def _said(form: str, text: str) -> str:
    """What a form says of a check that could not tell, read as its readers do."""
    match form:
        case "json":
            document = json.loads(text)
            assert (document["verdict"], document["command"], document["error"]["exit_code"]) == (
                "undecided",
                "check",
                2,
            )
            return str(document["error"]["message"])
        case "junit":
            root = ElementTree.fromstring(text)
            assert (root.get("errors"), root.get("failures"), root.get("tests")) == ("1", "0", "1")
            return root.findtext("testsuite/testcase/error") or ""
        case "github":
            assert text.count("\n") == 1
            return text.removeprefix("::error title=duat check::could not tell: ").rstrip("\n")
        case "sarif":
            (run,) = json.loads(text)["runs"]
            (invocation,) = run["invocations"]
            assert (invocation["executionSuccessful"], run["results"]) == (False, [])
            return str(invocation["toolExecutionNotifications"][0]["message"]["text"])
        case _:
            assert "COULD NOT TELL" in text
            return text.replace("\\", "")


FORMS = ("json", "junit", "github", "markdown", "sarif")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("case", "options", "word"),
    [
        ("st_truncated_data", (), "truncated"),
        ("good_single", ("--baseline", "no.json"), "no.json"),
        ("good_single", ("--policy", "broken.toml"), "broken.toml"),
        ("good_single", ("--select", "integrity.nope"), "integrity.nope"),
        ("good_single", ("--report", "json=missing/r.json"), "missing"),
    ],
)
def test_a_check_that_cannot_tell_says_so_in_every_form(
    form: str,
    case: str,
    options: tuple[str, ...],
    word: str,
    tmp_path: Path,
    duat: Duat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[rules\n")
    bad.build(case, tmp_path / "m")
    reports = [part for other in FORMS for part in ("--report", f"{other}={other}.txt")]
    done = duat("check", "m", *LIGHT, "--format", form, *options, *reports, "--report", "table=table.txt")
    assert done.code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("duat: error: ")]
    message = line.removeprefix("duat: error: ")
    assert word in message
    assert message in _said(form, done.stdout)
    for other in (*FORMS, "table"):
        assert message in _said(other, (tmp_path / f"{other}.txt").read_text())


def test_a_table_that_cannot_be_told_is_the_error_alone(tmp_path: Path, duat: Duat) -> None:
    bad.build("st_truncated_data", tmp_path / "m")
    done = duat("check", tmp_path / "m", *LIGHT)
    assert (done.code, done.stdout) == (2, "")


def test_a_fault_of_duat_is_no_empty_job(broken: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr("duat_cli.analysis.check.against.check", fails)
    done = duat("check", broken, *LIGHT, "--json")
    assert done.json["error"]["kind"] == "internal"
    assert "unexpected ZeroDivisionError: odd" in done.json["error"]["message"]


def test_what_one_place_cannot_take_the_others_say(broken: Path, tmp_path: Path, duat: Duat) -> None:
    """Files are written first: standard output never says that all is well where a report is lost."""
    good = tmp_path / "r.json"
    done = duat("check", broken, *LIGHT, "--json", "--report", "junit=/dev/full", "--report", f"json={good}")
    assert done.code == 2
    assert "No space left" in done.json["error"]["message"]
    assert "No space left" in json.loads(good.read_text())["error"]["message"]


# -- a command line that cannot be understood ----------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [("--max-tokens", "0"), ("--frobnicate",), ("--dtype", "float31")])
def test_a_wrong_option_is_said_in_every_form(wrong: tuple[str, ...], tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "r.xml"
    done = duat("check", "model", *wrong, "--format=github", "--report", f"junit={file}")
    assert done.code == 2
    [line] = done.stdout.splitlines()
    assert line.startswith("::error title=duat check::could not tell: ")
    assert wrong[0] in line
    suite = ElementTree.parse(file).getroot()
    assert suite.get("errors") == "1"
    assert [e.get("type") for e in suite.iter("error")] == ["input"]
    assert done.stderr.count("duat: error: ") == 1
    assert duat("check", *wrong, "--json").json["error"]["kind"] == "input"


def test_of_a_form_that_there_is_not_nothing_is_written(duat: Duat) -> None:
    done = duat("check", "--format", "xml")
    assert (done.code, done.stdout) == (2, "")
    assert duat("inspect", "--max-tokens", "0", "--json").stdout == ""


def test_a_baseline_that_is_no_json_is_an_error_of_the_input(broken: Path, tmp_path: Path, duat: Duat) -> None:
    (tmp_path / "b.json").write_text("{")
    done = duat("check", broken, "--baseline", tmp_path / "b.json", "--json")
    assert done.json["error"]["kind"] == "input"
    assert f"--baseline {tmp_path / 'b.json'}: not JSON" in done.json["error"]["message"]

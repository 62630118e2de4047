"""The forms of `duat check` for other programs: golden text, and what each reader insists on.

After a wanted change: `PYTHONPATH=tests/report python tests/report/forms/test_check.py` rewrites the golden files;
read their diff.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import sample_reports as sample

from duat_cli.report.check import sarif
from duat_cli.report.check.words import measured, unmeasured, verdict
from duat_cli.report.forms.check import render, render_undecided
from duat_cli.report.tables.page import Page
from duat_cli.results.check import Location

GOLDEN = Path(__file__).parents[1] / "golden"
FORMS = {"junit": "check.xml", "github": "check_github.txt", "markdown": "check.md", "sarif": "check.sarif"}
NAME = "m[bold]x[/red]\x1b[2J\u202e\x9b\ny"


def text(form: str, **fields: Any) -> str:
    return render(sample.check_report(**fields), form, Page(80))


@pytest.mark.parametrize("form", FORMS)
def test_golden(form: str) -> None:
    assert text(form) == (GOLDEN / FORMS[form]).read_text(encoding="utf-8")


@pytest.mark.parametrize("form", [*FORMS, "table", "json", "eval-results", "model-card"])
def test_foreign_strings_do_nothing(form: str) -> None:
    out = text(form, name=NAME)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert out.endswith("\n")


def test_junit_has_a_case_a_rule() -> None:
    root = ElementTree.fromstring(text("junit", name=NAME))
    suite = root[0]
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.get("tests", "")) == int(root.get("tests", "")) == 10
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures", "")) == 3
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped", "")) == 2
    assert len({case.get("name") for case in cases}) == 10  # one a rule, so that a name stays from run to run
    first, second = suite.findall("testcase/failure")[:2]
    assert "about 0.35 +- 0.09; at most 0.0001; tolerance of float32" in (first.text or "")
    assert len((first.text or "").splitlines()) == 10  # nine tensors, and what to do
    assert (second.get("message") or "").endswith("(behind weights)")
    assert suite.findtext("system-out") == "warning: a \\x1b[31mwarning"


def test_github_keeps_one_line_a_cause() -> None:
    lines = text("github", name=NAME).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 2 + ["::warning"] * 2 + ["::notice"]
    for line in lines[:3]:
        properties, _, message = line.partition(" ")[2].partition("::")
        found = dict(part.split("=", 1) for part in properties.split(","))
        assert set(found) == {"file", "line", "title"}
        assert ":" not in found["title"]
        assert message
    assert "file=models/a b%2Cc%3Ad%25.json,line=1" in lines[2]
    assert "100%25" in lines[2]
    assert lines[3] == "::warning title=duat check::a \\x1b[31mwarning"


def test_github_has_ten_annotations_and_the_rest_in_the_log() -> None:
    many = [f"warning {number} ::error::no ##[error]no" for number in range(20)]
    lines = render(sample.check_report().model_copy(update={"warnings": many}), "github", Page(80)).splitlines()
    shown = [line for line in lines if line.startswith(("::error", "::warning"))]
    assert len(shown) == 10
    start, end = lines.index("::group::duat check: 13 more"), lines.index("::endgroup::")
    assert end - start - 1 == 13
    for line in lines[start + 1 : end]:  # which GitHub must not take for commands
        assert line.startswith("- warning: warning ")
        assert "##[" not in line
    assert lines[-1].endswith("; 13 more in the log of this step")


def test_markdown_makes_no_link_and_no_cell() -> None:
    out = text("markdown")
    row = next(line for line in out.splitlines() if "unexpected" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    assert "<b>" not in out
    assert r"\[link=https&#58;//evil.example\]" in row
    assert "](" not in out


def test_a_file_of_another_drive_is_named_as_windows_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "PurePath", PureWindowsPath)
    for file, uri in (("C:/m o/config.json", "file:///C:/m%20o/config.json"), ("m/config.json", "m/config.json")):
        assert sarif._physical(Location(file=file, line=1))["artifactLocation"]["uri"] == uri


def test_sarif_has_a_place_for_every_result() -> None:
    document = json.loads(text("sarif", name=NAME))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(run["results"]) == 12  # a tensor in each of nine blocks, what follows in one, and two more
    assert [result["level"] for result in run["results"]] == ["error"] * 9 + ["note", "error", "warning"]
    for rule in run["tool"]["driver"]["rules"]:
        assert rule["shortDescription"]["text"].startswith("Looks at ")
        assert rule["fullDescription"]["text"].endswith(".")
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert notification["message"]["text"] == "a \\x1b[31mwarning"
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        (place,) = result["locations"]
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9/._%~-]+", uri), uri
        assert unquote(uri) in ("duat-baseline.json", "duat.toml", "models/a b,c:d%.json")
        assert place["physicalLocation"]["region"]["startLine"] >= 1
    prints = [result["partialFingerprints"]["duat/v2"] for result in run["results"]]
    assert len(set(prints)) == 12
    assert run["invocations"][0]["exitCode"] == 1


def test_a_sound_report_is_not_empty_in_any_form() -> None:
    for form in FORMS:
        assert text(form, sound=True)
    assert json.loads(text("sarif", sound=True))["runs"][0]["results"] == []
    assert "PASSED: 4 passed, 2 skipped" in text("github", sound=True)


@pytest.mark.parametrize("form", [*FORMS, "table", "json", "eval-results", "model-card"])
def test_every_form_says_what_could_not_be_told(form: str) -> None:
    out = render_undecided(sample.undecided_report(name=NAME), form)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "cannot be read" in out
    assert out.endswith("\n")


def test_an_error_is_no_failure_and_no_success() -> None:
    report = sample.undecided_report()
    root = ElementTree.fromstring(render_undecided(report, "junit"))
    assert (root.get("errors"), root.get("failures")) == ("1", "0")
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert (error.get("type"), error.text) == ("checkpoint", "100%: cannot be read\\x1b[2J")
    (run,) = json.loads(render_undecided(report, "sarif"))["runs"]
    assert run["results"] == []
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    (said,) = invocation["toolExecutionNotifications"]
    assert (said["level"], said["message"]["text"]) == ("error", "100%: cannot be read\\x1b[2J")
    assert render_undecided(report, "github") == (
        "::error title=duat check::could not tell: 100%25: cannot be read\\x1b[2J\n"
    )
    assert "**COULD NOT TELL** (exit code 2)" in render_undecided(report, "markdown")


def test_all_leaves_nothing_out() -> None:
    short, whole = (render(sample.check_report(), "table", Page(80, every=every)) for every in (False, True))
    assert "and 3 more, in blocks 6-8; --all lists them" in short
    assert "effective_context' went" not in short
    assert "passed: 4 rules; --all lists them" in short
    for words in ("layers.8.mlp.up_proj.weight' moved", "effective_context' went", "nothing found: integrity."):
        assert words in whole
    assert "--all" not in whole


def test_a_family_is_named_as_a_whole_only_where_all_of_it_has_one_reason() -> None:
    report = sample.check_report()
    skipped = next(o for o in report.outcomes if o.status == "skipped")
    reasons = {"behaviour.loss": "no head", "behaviour.logits": "no head", "behaviour.agreement": "no --baseline"}
    reasons |= {"adapter.config": "no --adapter", "adapter.behaviour": "no --adapter"}
    outcomes = [skipped.model_copy(update={"rule": rule, "message": why}) for rule, why in reasons.items()]
    report = report.model_copy(update={"outcomes": outcomes, "causes": []})
    expected = {
        "no head": ["behaviour.loss", "behaviour.logits"],
        "no --baseline": ["behaviour.agreement"],
        "no --adapter": ["adapter.*"],
    }
    assert unmeasured(report) == expected
    assert "- behaviour.loss, behaviour.logits: skipped, no head" in render(report, "markdown", Page(80))


def test_words() -> None:
    report = sample.check_report()
    assert verdict(report) == ("FAILED: 2 causes (10 findings, 1 behind them), 1 warning, 4 passed, 2 skipped")
    assert [measured(o) for o in report.outcomes[8:13]] == [
        "about 0.27 +- 0.07; at most 0.0001",
        "2.5 < 3",
        "",
        "1 > 0",
        "0 values (<= 0)",
    ]


if __name__ == "__main__":
    for form, name in FORMS.items():
        (GOLDEN / name).write_text(text(form), encoding="utf-8")

"""The forms of `duat check` for other programs: golden text, and what each reader insists on.

After a wanted change: `PYTHONPATH=tests/report python tests/report/check/test_forms.py` rewrites the golden files;
read their diff.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import sample_reports as sample

from duat_cli.report.check.forms import render
from duat_cli.report.check.words import measured, verdict
from duat_cli.report.tables.page import Page

GOLDEN = Path(__file__).parents[1] / "golden"
FORMS = {"junit": "check.xml", "github": "check_github.txt", "markdown": "check.md", "sarif": "check.sarif"}
NAME = "m[bold]x[/red]\x1b[2J\u202e\x9b\ny"


def text(form: str, **fields: Any) -> str:
    return render(sample.check_report(**fields), form, Page(80))


@pytest.mark.parametrize("form", FORMS)
def test_golden(form: str) -> None:
    assert text(form) == (GOLDEN / FORMS[form]).read_text(encoding="utf-8")


@pytest.mark.parametrize("form", [*FORMS, "table", "json"])
def test_foreign_strings_do_nothing(form: str) -> None:
    out = text(form, name=NAME)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert out.endswith("\n")


def test_junit_has_a_case_a_check() -> None:
    root = ElementTree.fromstring(text("junit", name=NAME))
    suite = root[0]
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.get("tests", "")) == int(root.get("tests", "")) == 18
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures", "")) == 11
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped", "")) == 2
    assert len({(case.get("classname"), case.get("name")) for case in cases if case.find("failure") is not None}) == 11
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "0.35 > 0.0001; tolerance of float32" in (failure.text or "")


def test_github_keeps_one_line_a_finding() -> None:
    lines = text("github", name=NAME).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 11 + ["::warning", "::notice"]
    for line in lines[:-1]:
        properties, _, message = line.partition(" ")[2].partition("::")
        found = dict(part.split("=", 1) for part in properties.split(","))
        assert set(found) == {"file", "line", "title"}
        assert ":" not in found["title"]
        assert message
    assert "file=models/a b%2Cc%3Ad%25.json,line=1" in lines[-2]
    assert "100%25" in lines[-2]


def test_markdown_makes_no_link_and_no_cell() -> None:
    out = text("markdown")
    row = next(line for line in out.splitlines() if "unexpected" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    assert "<b>" not in out
    assert r"\[link=https&#58;//evil.example\]" in row
    assert "](" not in out


def test_sarif_has_a_place_for_every_result() -> None:
    document = json.loads(text("sarif", name=NAME))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(run["results"]) == 12
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        (place,) = result["locations"]
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9/._%~-]+", uri), uri
        assert unquote(uri) in ("duat-baseline.json", "duat.toml", "models/a b,c:d%.json")
        assert place["physicalLocation"]["region"]["startLine"] >= 1
        assert result["level"] in ("error", "warning")
    prints = [result["partialFingerprints"]["duat/v1"] for result in run["results"]]
    assert len(set(prints)) == 12
    assert run["invocations"][0]["exitCode"] == 1


def test_a_sound_report_is_not_empty_in_any_form() -> None:
    for form in FORMS:
        assert text(form, sound=True)
    assert json.loads(text("sarif", sound=True))["runs"][0]["results"] == []
    assert "PASSED: 4 passed, 2 skipped" in text("github", sound=True)


def test_words() -> None:
    report = sample.check_report()
    assert verdict(report) == "FAILED: 11 failed, 1 warning, 4 passed, 2 skipped"
    assert [measured(o) for o in report.outcomes[8:13]] == ["0.27 > 0.0001", "2.5 < 3", "", "1 > 0", "0 (<= 0)"]


if __name__ == "__main__":
    for form, name in FORMS.items():
        (GOLDEN / name).write_text(text(form), encoding="utf-8")

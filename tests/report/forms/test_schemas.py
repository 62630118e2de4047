"""SARIF against the standard's schema, JUnit against what its readers take, action.yml against the published schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
import yaml

from duat_cli.report.forms.check import render, render_undecided
from duat_cli.report.tables.page import Page

jsonschema = pytest.importorskip("jsonschema")
xmlschema = pytest.importorskip("xmlschema")

SCHEMAS = Path(__file__).parents[2] / "fixtures" / "schemas"
ACTION = Path(__file__).parents[3] / "configs" / "action" / "action.yml"
FOREIGN = "m[bold]x[/red]\x1b[2J\u202e\x9b\ny & <a> ]]>"


def texts(form: str) -> list[str]:
    """Findings, none, foreign names, and a run without a verdict."""
    reports = (sample.check_report(), sample.check_report(sound=True), sample.check_report(name=FOREIGN))
    return [
        *(render(report, form, Page(80)) for report in reports),
        *(render_undecided(sample.undecided_report(name=name), form) for name in ("org/model", FOREIGN)),
    ]


def validator(name: str) -> Any:
    return jsonschema.Draft7Validator(json.loads((SCHEMAS / name).read_text(encoding="utf-8")))


def test_sarif() -> None:
    schema = validator("sarif-schema-2.1.0.json")
    for text in texts("sarif"):
        assert [error.message for error in schema.iter_errors(json.loads(text))] == []


def test_junit() -> None:
    schema = xmlschema.XMLSchema(SCHEMAS / "junit.xsd")
    for text in texts("junit"):
        assert [str(error.reason) for error in schema.iter_errors(text)] == []


def test_action() -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    assert [error.message for error in validator("github-action.json").iter_errors(action)] == []


def test_the_schemas_can_fail() -> None:
    document = json.loads(texts("sarif")[0])
    document["runs"][0]["results"][0]["level"] = "fatal"
    assert list(validator("sarif-schema-2.1.0.json").iter_errors(document))
    schema = xmlschema.XMLSchema(SCHEMAS / "junit.xsd")
    assert list(schema.iter_errors(texts("junit")[0].replace('failures="3"', 'failures="three"')))
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    del action["runs"]["using"]
    assert list(validator("github-action.json").iter_errors(action))

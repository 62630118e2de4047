"""`duat check` as JUnit XML: one test case a check."""

from __future__ import annotations

from xml.etree import ElementTree

from duat_cli.report.check.words import place, sentence
from duat_cli.results.check import CheckReport, Outcome
from duat_cli.text import clean


def render_junit(report: CheckReport) -> str:
    """Warnings pass and say so in system-out; JUnit knows no level between."""
    count = report.counts
    total = count.failed + count.warned + count.passed + count.skipped
    sums = {
        "tests": str(total),
        "failures": str(count.failed),
        "errors": "0",
        "skipped": str(count.skipped),
        "time": f"{report.run.seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "duat check", **sums})
    suite = ElementTree.SubElement(root, "testsuite", {"name": clean(report.model.name), **sums})
    suite.set("timestamp", report.run.started.removesuffix("+00:00"))
    for outcome in report.outcomes:
        _case(suite, outcome)
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _case(suite: ElementTree.Element, outcome: Outcome) -> None:
    where = outcome.where or place(outcome)
    name = clean(f"{outcome.rule} {where}" if where and outcome.status in ("failed", "warned") else outcome.rule)
    attributes = {"classname": outcome.rule, "name": name, "file": clean(outcome.location.file)}
    case = ElementTree.SubElement(suite, "testcase", attributes | {"line": str(outcome.location.line)})
    message = clean(outcome.message)
    if outcome.status == "failed":
        failure = ElementTree.SubElement(case, "failure", {"type": outcome.rule, "message": message})
        failure.text = clean(sentence(outcome))
    elif outcome.status == "skipped":
        ElementTree.SubElement(case, "skipped", {"message": message})
    elif outcome.status == "warned":
        ElementTree.SubElement(case, "system-out").text = clean(f"warning: {sentence(outcome)}")

"""`duat check` as JUnit XML: one test case per rule, so that names are the same in every run."""

from __future__ import annotations

from xml.etree import ElementTree

from duat_cli.grouping import by_key
from duat_cli.report.check.words import advice, limit
from duat_cli.results.check import CheckReport, Outcome, UndecidedReport
from duat_cli.text import clean


def render_junit(report: CheckReport) -> str:
    """The report as XML. Rules with warnings pass, with the warnings in system-out, as JUnit has no such level."""
    by_rule = by_key((outcome.rule, outcome) for outcome in report.outcomes)
    worst = [_worst(found) for found in by_rule.values()]
    root, suite = _suite(report.model.name, len(worst), report.run.seconds)
    for element in (root, suite):
        element.set("failures", str(worst.count("failed")))
        element.set("skipped", str(worst.count("skipped")))
    suite.set("timestamp", report.run.started.removesuffix("+00:00"))
    for found in by_rule.values():
        _case(suite, found)
    if report.warnings:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(f"warning: {clean(w)}" for w in report.warnings)
    return _text(root)


def undecided_junit(report: UndecidedReport) -> str:
    """One test case with an error, which is no failure, as nothing was found out."""
    root, suite = _suite(report.model or "the bundled demo", 1, 0.0)
    for element in (root, suite):
        element.set("errors", "1")
    case = ElementTree.SubElement(suite, "testcase", {"classname": "duat.check", "name": "could not tell"})
    message = clean(report.error.message)
    ElementTree.SubElement(case, "error", {"type": report.error.kind, "message": message}).text = message
    return _text(root)


def _suite(name: str, tests: int, seconds: float) -> tuple[ElementTree.Element, ElementTree.Element]:
    sums = {"tests": str(tests), "failures": "0", "errors": "0", "skipped": "0", "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", {"name": "duat check", **sums})
    return root, ElementTree.SubElement(root, "testsuite", {"name": clean(name), **sums})


def _text(root: ElementTree.Element) -> str:
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _worst(found: list[Outcome]) -> str:
    return min((o.status for o in found), key=("failed", "warned", "passed", "skipped").index)


def _case(suite: ElementTree.Element, found: list[Outcome]) -> None:
    first, status = found[0], _worst(found)
    attributes = {"classname": first.rule.partition(".")[0], "name": first.rule, "file": clean(first.location.file)}
    case = ElementTree.SubElement(suite, "testcase", attributes | {"line": str(first.location.line)})
    failed, warned = ([o for o in found if o.status == status] for status in ("failed", "warned"))
    if failed:
        text = "\n".join([*map(_line, failed), *map(clean, advice(failed))])
        ElementTree.SubElement(case, "failure", {"type": first.rule, "message": _message(failed)}).text = text
    elif status == "skipped":
        ElementTree.SubElement(case, "skipped", {"message": clean(first.message)})
    if warned:
        text = "\n".join([*(f"warning: {_line(outcome)}" for outcome in warned), *map(clean, advice(warned))])
        ElementTree.SubElement(case, "system-out").text = text


def _message(failed: list[Outcome]) -> str:
    """The first finding, how many more there are, and what they follow from."""
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    behind = sorted({o.behind for o in failed if o.behind})
    after = f" (behind {', '.join(behind)})" if behind and all(o.behind for o in failed) else ""
    return clean(f"{failed[0].message}{more}{after}")


def _line(outcome: Outcome) -> str:
    behind = f" (behind {outcome.behind})" if outcome.behind else ""
    return clean(f"{outcome.message} {limit(outcome)}{behind}")

"""`duat check` as SARIF 2.1.0: one run; every result has a physical location, as GitHub drops the file otherwise.

A cause is one result for each of its rules and blocks; its effects are one note per block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from duat_cli.grouping import by_key
from duat_cli.report.check.words import advice, effects, limit, own, sentence
from duat_cli.results.check import Cause, CheckReport, Location, Outcome, RuleFacts, UndecidedReport
from duat_cli.text import clean, plural, some

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_MOST = 5000  # most results of a run that GitHub shows; the last ones matter least
_NAMED = 3  # how many findings of a block a message names


def render_sarif(report: CheckReport) -> str:
    results = [result for cause in report.causes for result in _results(cause, report)][:_MOST]
    levels = {outcome.rule: _level(outcome) for outcome in report.outcomes}
    used = {result["ruleId"] for result in results}
    rules = [rule for rule in report.rules if rule.id in used]
    places = {rule.id: at for at, rule in enumerate(rules)}
    for result in results:
        result["ruleIndex"] = places[result["ruleId"]]
    invocation = {
        "executionSuccessful": True,
        "exitCode": 1 if report.verdict == "failed" else 0,
        "toolExecutionNotifications": [_notification("warning", "warning", text) for text in report.warnings],
    }
    return _document(report.duat_version, [_rule(rule, levels[rule.id]) for rule in rules], invocation, results)


def undecided_sarif(report: UndecidedReport) -> str:
    """A run without results, with a notification that says why; otherwise it would mean that nothing was found."""
    error = report.error
    invocation = {
        "executionSuccessful": False,
        "exitCode": error.exit_code,
        "toolExecutionNotifications": [_notification("error", error.kind, error.message)],
    }
    return _document(report.duat_version, [], invocation, [])


def _document(
    version: str, rules: list[dict[str, Any]], invocation: dict[str, Any], results: list[dict[str, Any]]
) -> str:
    run = {
        "tool": {"driver": {"name": "duat", "semanticVersion": version, "rules": rules}},
        "invocations": [invocation],
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _notification(level: str, kind: str, text: str) -> dict[str, Any]:
    return {"level": level, "descriptor": {"id": f"duat/{kind}"}, "message": {"text": clean(text)}}


def _rule(rule: RuleFacts, level: str) -> dict[str, Any]:
    about = f"Looks at {clean(rule.about)}."
    return {
        "id": rule.id,
        "shortDescription": {"text": about},
        "fullDescription": {"text": f"{about} {clean(rule.advice)}"},
        "help": {"text": f"{clean(rule.advice)} More: duat explain {rule.id}"},
        "defaultConfiguration": {"level": level},
    }


def _results(cause: Cause, report: CheckReport) -> Iterator[dict[str, Any]]:
    """Results of a cause: its own findings by block and rule, then its effects by block."""
    groups = by_key(((outcome.block, outcome.rule), outcome) for outcome in own(report, cause))
    for (block, rule), found in groups.items():
        print_ = f"{rule}\0{block}\0{found[0].where if block is None else ''}"
        yield _result(found[0], _level(found[0]), _together(found), print_)
    behind = by_key((outcome.block, outcome) for outcome in effects(report, cause))
    for block in sorted(behind, key=lambda b: (b is None, b or 0)):
        found = behind[block]
        where = f"block {block}" if block is not None else "the whole model"
        text = f"{plural(len(found), 'finding')} of {where} behind {cause.id}: {_named(found)}"
        yield _result(found[0], "note", text, f"behind\0{block}")


def _together(found: list[Outcome]) -> str:
    if len(found) == 1:
        return sentence(found[0])
    return f"{len(found)} findings: {_named(found)}. {' '.join(advice(found))}".strip()


def _named(found: list[Outcome]) -> str:
    return some([f"{outcome.message} {limit(outcome)}" for outcome in found], _NAMED, "; ", "; and ")


def _result(first: Outcome, level: str, text: str, identity: str) -> dict[str, Any]:
    return {
        "ruleId": first.rule,
        "level": level,
        "message": {"text": clean(text)},
        "locations": [{"physicalLocation": _physical(first.location)}],
        "partialFingerprints": {"duat/v2": hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]},
    }


def _physical(location: Location) -> dict[str, Any]:
    path = quote(location.file, errors="replace")
    uri = f"file://{path}" if path.startswith("/") else path
    if PurePath(location.file).drive:  # a Windows path
        uri = PurePath(location.file).as_uri()
    return {"artifactLocation": {"uri": uri}, "region": {"startLine": location.line}}


def _level(outcome: Outcome) -> str:
    return "error" if outcome.level == "error" else "warning"

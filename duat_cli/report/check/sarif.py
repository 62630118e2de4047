"""`duat check` as SARIF 2.1.0: one run, every result with a physical location, without which GitHub drops the file."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from duat_cli.report.check.words import findings, sentence
from duat_cli.results.check import CheckReport, Location, Outcome
from duat_cli.text import clean

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_MOST = 5000  # results of a run that GitHub shows; what comes last is least


def render_sarif(report: CheckReport) -> str:
    found = findings(report)[:_MOST]
    rules = sorted({outcome.rule for outcome in found})
    run = {
        "tool": {
            "driver": {
                "name": "duat",
                "semanticVersion": report.duat_version,
                "rules": [_rule(rule, found) for rule in rules],
            }
        },
        "invocations": [{"executionSuccessful": True, "exitCode": 1 if report.verdict == "failed" else 0}],
        "results": [_result(outcome, rules) for outcome in found],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _rule(rule: str, found: list[Outcome]) -> dict[str, Any]:
    first = next(o for o in found if o.rule == rule)
    return {
        "id": rule,
        "shortDescription": {"text": rule},
        "help": {"text": clean(first.advice or rule)},
        "defaultConfiguration": {"level": _level(first)},
    }


def _result(outcome: Outcome, rules: list[str]) -> dict[str, Any]:
    where = f"{outcome.rule}\0{outcome.block}\0{outcome.where}"
    return {
        "ruleId": outcome.rule,
        "ruleIndex": rules.index(outcome.rule),
        "level": _level(outcome),
        "message": {"text": clean(sentence(outcome))},
        "locations": [{"physicalLocation": _physical(outcome.location)}],
        "partialFingerprints": {"duat/v1": hashlib.sha256(where.encode("utf-8", "surrogatepass")).hexdigest()[:32]},
    }


def _physical(location: Location) -> dict[str, Any]:
    path = quote(location.file, errors="replace")
    uri = f"file://{path}" if path.startswith("/") else path
    return {"artifactLocation": {"uri": uri}, "region": {"startLine": location.line}}


def _level(outcome: Outcome) -> str:
    return "error" if outcome.level == "error" else "warning"

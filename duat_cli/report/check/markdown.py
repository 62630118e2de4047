"""`duat check` as Markdown, for a job's summary or a comment."""

from __future__ import annotations

import re

from duat_cli.report.check.words import findings, measured, place, verdict
from duat_cli.results.check import CheckReport, Outcome
from duat_cli.text import clean

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}
_SHOWN = 50  # GitHub cuts a summary at 1 MB


def render_markdown(report: CheckReport) -> str:
    """A table of the findings, and the rest folded away."""
    model = report.model
    policies = ", then ".join(map(_text, report.policy))
    about = f"{_text(model.model_type or 'unknown type')}, {model.tensors} tensors; {policies}"
    found = findings(report)
    lines = [f"## duat check: {_text(model.name)}", "", f"**{verdict(report)}**", "", about, ""]
    if found:
        lines += ["| | rule | where | measured | found | what to do |", "|---|---|---|---|---|---|"]
        lines += [_row(outcome) for outcome in found[:_SHOWN]]
        lines += ["", *([f"And {len(found) - _SHOWN} more.", ""] if len(found) > _SHOWN else [])]
    if report.warnings:
        lines += ["Warnings:", "", *(f"- {_text(warning)}" for warning in report.warnings), ""]
    rest = [o for o in report.outcomes if o.status in ("passed", "skipped")]
    lines += [f"<details><summary>{len(rest)} without findings</summary>", ""]
    lines += [f"- {o.rule}: {o.status}, {_text(measured(o) or o.message)}" for o in rest]
    return "\n".join([*lines, "", "</details>"]) + "\n"


def _row(outcome: Outcome) -> str:
    cells = (
        outcome.status,
        outcome.rule,
        _text(place(outcome)),
        _text(measured(outcome)),
        _text(outcome.message),
        _text(f"{outcome.advice or ''} (threshold: {outcome.source})"),
    )
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """No foreign string makes a link, an image, HTML or a cell of its own."""
    escaped = re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", clean(text))
    for raw, entity in _ENTITIES.items():
        escaped = escaped.replace(raw, entity)
    return escaped

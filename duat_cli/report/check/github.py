"""`duat check` as annotations of GitHub Actions: one workflow command a finding, on standard output."""

from __future__ import annotations

from duat_cli.report.check.words import findings, place, sentence, verdict
from duat_cli.results.check import CheckReport, Outcome
from duat_cli.text import clean


def render_github(report: CheckReport) -> str:
    """The verdict comes last and as a notice, so that a run without findings says something too."""
    lines = [_annotation(outcome) for outcome in findings(report)]
    lines.append(f"::notice title=duat check::{_data(f'{report.model.name}: {verdict(report)}')}")
    return "\n".join(lines) + "\n"


def _annotation(outcome: Outcome) -> str:
    kind = "error" if outcome.status == "failed" else "warning"
    where = place(outcome)
    title = f"{outcome.rule}, {where}" if where else outcome.rule
    at = f"file={_property(outcome.location.file)},line={outcome.location.line},title={_property(title)}"
    return f"::{kind} {at}::{_data(sentence(outcome))}"


def _data(text: str) -> str:
    """GitHub's own escapes; line breaks of foreign strings are escaped already."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

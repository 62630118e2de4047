"""Findings in tables: where, what was measured, against which bound, and where that bound comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duat_cli.report.check.words import advice, heading, number
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.tables import numbers
from duat_cli.results.check import CheckReport, Outcome

SHOWN = 8  # causes with a table of their own
_MARKS = {
    "failed": "\N{BALLOT X} failed",
    "warned": "! warned",
    "passed": "\N{CHECK MARK} passed",
    "skipped": "- skipped",
}
_COLUMNS: tuple[tuple[Head, Callable[[Outcome], str]], ...] = (
    (Head("rule", path="rule", number=False), lambda one: one.rule),
    (Head("status", path="", number=False), lambda one: _MARKS[one.status]),
    (Head("block", path="block"), lambda one: numbers.whole(one.block)),
    (Head("what was found", path="message", number=False, long=True), lambda one: one.message),
    (Head("measured", path="measured"), lambda one: number(one.measured) or numbers.ABSENT),
    (Head("least", path="low"), lambda one: number(one.low) or numbers.ABSENT),
    (Head("most", path="high"), lambda one: number(one.high) or numbers.ABSENT),
    (Head("unit", path="unit", number=False), lambda one: one.unit),
    (Head("threshold's source", path="source", number=False), lambda one: one.source),
    (Head("where to look", path="", number=False), lambda one: f"{one.location.file}:{one.location.line}"),
)


def outcomes(report: CheckReport, places: Sequence[int]) -> Table:
    """A row an outcome. places: their positions in the report's `outcomes`."""
    return table_by("outcomes[]", [report.outcomes[i] for i in places], *_COLUMNS, numbers=places)


def causes(report: CheckReport) -> list[Figure]:
    """A figure a cause, in the report's order: what failed first stands first; then what follows from all of them."""
    found = []
    for k, cause in enumerate(report.causes[:SHOWN]):
        own = [report.outcomes[i] for i in cause.findings]
        behind = f" {cause.folded[:1].upper()}{cause.folded[1:]}." if cause.folded else ""
        found.append(
            Figure(
                key=f"cause-{k}",
                wide=True,
                title=f"{'What was found first: ' if k == 0 else ''}{heading(cause)}",
                says=f"{cause.message}.{behind} {' '.join(advice(own))}".strip(),
                tables=[outcomes(report, cause.findings)],
                terms=["causes[].origin", "outcomes[].measured", "outcomes[].source"],
                notes=[f"{len(report.causes) - SHOWN} further causes are in the list of all checks."]
                if k == SHOWN - 1 and len(report.causes) > SHOWN
                else [],
            )
        )
    return found


def every(report: CheckReport) -> Figure:
    """All outcomes: what failed, then what warned, passed, was skipped."""
    order = {status: i for i, status in enumerate(_MARKS)}
    places = sorted(range(len(report.outcomes)), key=lambda i: order[report.outcomes[i].status])
    return Figure(
        key="all",
        wide=True,
        title="All checks, with their thresholds",
        says="What failed first, then warnings, what passed, and what was skipped with the reason.",
        tables=[outcomes(report, places)],
        terms=["outcomes[].status", "outcomes[].low", "outcomes[].high"],
    )

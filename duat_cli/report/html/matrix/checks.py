"""How exact each step of the paper is, and each layer of the network that is made of its matrices."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.table import Head, table_by
from duat_cli.report.tables import numbers
from duat_cli.report.tables.matrix import VERDICTS
from duat_cli.results.matrix import MatrixReport

_SAYS = (
    "|left - right| / |right|, both sides computed separately. The model's own is the H V of its forward pass "
    "and what that moves in its own block, biases left out. c: as many of the M columns as can be built; <> is the "
    "diamond product, W <> x = W^T x."
)


def checks(report: MatrixReport, beside: Sequence[MatrixReport]) -> Figure:
    """A point a check, and a line at its tolerance; what is exactly zero has no place on the axis."""
    rows = report.checks
    every = [value for one in beside for check in one.checks for value in (check.relative_error, check.tolerance)]
    plot = Plot(
        Axis("check (number in the table)", Band([str(number + 1) for number in range(len(rows))])),
        Axis("relative error", Log.over(every)),
        height=250,
    )
    drawn = []
    for place, check in enumerate(rows):
        at = plot.y(check.tolerance)
        said = f"tolerance {check.tolerance:.0e}"
        drawn.append(marks.rule(plot.x(place - 0.4), at, plot.x(place + 0.4), at, said))
        if check.relative_error:
            text = f"{check.name}: {numbers.error(check.relative_error)}, {VERDICTS[check.holds]}"
            drawn.append(marks.dot(plot.x(place), plot.y(check.relative_error), "s1", text))
    zero = [str(number + 1) for number, check in enumerate(rows) if check.relative_error == 0]
    notes = [f"An error of 0 has no place on this axis: check {', '.join(zero)}."] if zero else []
    reasons = dict.fromkeys(check.reasons["relative_error"] for check in rows if "relative_error" in check.reasons)
    return Figure(
        key="checks",
        wide=True,
        title="Every step of the paper, checked",
        says=_SAYS,
        picture=plot.svg(drawn, "A point for each check, and its tolerance."),
        tables=[
            table_by(
                "checks[]",
                list(enumerate(rows, 1)),
                (Head("check"), lambda one: str(one[0])),
                (Head("statement", path="statement", number=False, long=True), lambda one: one[1].statement),
                (Head("error", "relative", "relative_error"), lambda one: numbers.error(one[1].relative_error)),
                (Head("tolerance", "relative", "tolerance"), lambda one: numbers.error(one[1].tolerance)),
                (Head("verdict", number=False), lambda one: VERDICTS[one[1].holds]),
            )
        ],
        terms=["checks[].relative_error", "checks[].tolerance"],
        legend=[("dot", "s1", "relative error"), ("rule", "s1", "tolerance")],
        notes=[*notes, *(f"Not checked: {reason}." for reason in reasons)],
        opened=True,
    )

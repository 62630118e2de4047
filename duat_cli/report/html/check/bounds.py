"""What was measured, as a share of the bound that it was held against."""

from __future__ import annotations

from duat_cli.report.html.check.findings import outcomes
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.results.check import CheckReport, Outcome

_SERIES = {"failed": ("s4", "failed"), "warned": ("s2", "warned"), "passed": ("s1", "passed")}
_RULES = 40
_LEAST = 1e-3  # of a bound: what is nearer to the centre is drawn here


def bounds(report: CheckReport) -> Figure | None:
    """A point an outcome with a number and a bound above zero: right of the line it is outside."""
    found = [(i, ratio) for i, one in enumerate(report.outcomes) if (ratio := share(one)) is not None]
    rules = list(dict.fromkeys(report.outcomes[i].rule for i, _ in found))[:_RULES][::-1]
    if not rules:
        return None
    plot = Plot(
        Axis("measured, as a share of its bound", Log.over([*(ratio for _, ratio in found), 1.0])),
        Axis("", Band(rules, most=_RULES)),
        height=80 + 22 * len(rules),
        longest=max(map(len, rules)),
    )
    line = plot.x(1.0)
    drawn = [marks.rule(line, plot.top, line, plot.bottom, "the bound")]
    drawn += [
        marks.dot(
            plot.x(ratio), plot.y(rules.index(one.rule)), _SERIES[one.status][0],
            f"{one.rule}: {ratio:.3g} of its bound; {one.message}",
        )
        for i, ratio in found
        if (one := report.outcomes[i]).rule in rules
    ]  # fmt: skip
    shown = [name for name in _SERIES if any(report.outcomes[i].status == name for i, _ in found)]
    return Figure(
        key="bounds",
        wide=True,
        title="How near each measurement is to its bound",
        says="Right of the dashed line a measurement lies outside: above the most that passes, or below the least. "
             "Between two bounds it is the distance from their centre, as a share of half their distance; one of "
             "0.001 and less is drawn at 0.001.",
        picture=plot.svg(drawn, "Points by rule: measurement over bound, on a logarithmic axis."),
        tables=[outcomes(report, [i for i, _ in found])],
        terms=["outcomes[].measured", "outcomes[].high", "outcomes[].low"],
        legend=[("dot", _SERIES[name][0], _SERIES[name][1]) for name in shown],
        notes=["Of a single bound, measurements of 0, bounds of 0 and negative numbers have no place on this axis; the "
               "list of all checks has them."],
    )  # fmt: skip


def share(one: Outcome) -> float | None:
    """How much of the room is used, 1 at the bound. Between two bounds |measured - centre| / half the width, at least
    0.001; of one bound measured / most, or least / measured. None where that is no positive number."""
    if one.measured is None or one.status == "skipped":
        return None
    if one.low is not None and one.high is not None:
        half = (one.high - one.low) / 2
        return max(_LEAST, abs(one.measured - one.low - half) / half) if half > 0 else None
    if one.measured <= 0:
        return None
    if one.high is not None:
        return one.measured / one.high if one.high > 0 else None
    return one.low / one.measured if one.low is not None and one.low > 0 else None

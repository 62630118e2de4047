"""Sets of terms: damage against the share removed, the budget, and the guarantee."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.kinds import KINDS, NAMES
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.series import dotted, level
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.prune.sets import held_out_columns, plan_columns
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import CurvePoint, HeldOut, Plan

_MANY = {**NAMES, "attention": "attention layers"}


def many(granularity: str) -> str:
    """The terms of a set, such as neurons and heads."""
    return " and ".join(_MANY[kind] for kind in KINDS if kind in granularity.split(","))


def curves(report: PruneReport, beside: Sequence[PruneReport]) -> list[Figure]:
    """A figure a plan that has a curve."""
    return [_curve(report, number, beside) for number, plan in enumerate(report.plans) if plan.curve]


def _curve(report: PruneReport, number: int, beside: Sequence[PruneReport]) -> Figure:
    plan, unit = report.plans[number], report.protocol.unit
    alike = [p for other in beside for p in other.plans if p.granularity == plan.granularity]
    plot = Plot(
        Axis(
            f"share of {many(plan.granularity)} removed (%)",
            Linear.over((c.share for p in alike for c in p.curve), percent=True),
        ),
        Axis(f"damage ({unit})", Linear.over(v for p in alike for v in _damages(p))),
        width=500,
        height=270,
    )
    drawn = [level(plot, plan.budget, "the budget")]
    for series, word, points in (
        ("s2", "predicted", [(c.share, c.predicted) for c in plan.curve]),
        ("s1", "measured", [(c.share, c.measured) for c in plan.curve if c.measured is not None]),
    ):
        said = f"% removed, {word}:"
        drawn += dotted(plot, [(x, y, f"{numbers.percent(x)} {said} {numbers.plain(y)}") for x, y in points], series)
    for one in plan.held_out:
        x = plot.x(one.share)
        drawn.append(marks.interval(x, plot.y(one.mean), x, plot.y(one.percentile_90), "s3"))
        said = f"{numbers.percent(one.share)} % removed, held-out mean: {numbers.plain(one.mean)} {unit}"
        drawn.append(marks.dot(x, plot.y(one.mean), "s3", said))
    columns = [column for column in plan_columns(unit) if column.path in CurvePoint.model_fields]
    samples = [("line", "s2", "predicted"), ("line", "s1", "measured, on the prompts that chose the set")]
    samples += [("dot", "s3", "held-out prompts: mean, up to 9 of 10")] if plan.held_out else []
    samples.append(("rule", "s1", "budget"))
    return Figure(
        key=f"curve-{plan.granularity.replace(',', '-')}",
        title=f"Damage against the share of {many(plan.granularity)} removed, least damaging first",
        says="Sets grow from the least damaging term on. Below the dashed line they are within the budget.",
        picture=plot.svg(drawn, "Lines: predicted and measured damage against the share removed, with the budget."),
        tables=[
            _table(plan, number, "curve", plan.curve, columns),
            *([_table(plan, number, "held_out", plan.held_out, held_out_columns(unit))] if plan.held_out else []),
        ],
        terms=["plans[].curve[].predicted", "plans[].curve[].measured", "plans[].guarantee", "plans[].held_out[].mean"],
        legend=samples,
    )


def _damages(plan: Plan) -> list[float | None]:
    held = [v for one in plan.held_out for v in (one.mean, one.percentile_90)]
    return [plan.budget, *(v for c in plan.curve for v in (c.predicted, c.measured)), *held]


def _table(
    plan: Plan, number: int, field: str, rows: Sequence[CurvePoint] | Sequence[HeldOut], columns: Sequence[Column]
) -> Table:
    head, path = Head("set", number=False), f"plans.{number}.{field}[]"
    return table_of(rows, head, lambda _: many(plan.granularity), on_page(columns), path)


def plans(report: PruneReport) -> Table:
    """The set of each kind: the largest within the budget, or the one that was asked for."""
    unit = report.protocol.unit
    columns = [
        Column(("removed", "terms"), "removed", numbers.whole),
        Column(("of", "terms"), "of", numbers.whole),
        Column(("share", "%"), "share", numbers.percent),
        Column(("budget", unit), "budget", numbers.plain),
        Column(("predicted", unit), "predicted", numbers.plain),
        Column(("measured", unit), "measured", numbers.plain),
        Column(("saved", "parameters"), "saves.parameters_removed", numbers.whole),
        Column(("saved", "bytes"), "saves.bytes_removed", numbers.whole),
        Column(("zeroed", "parameters"), "saves.parameters_zeroed", numbers.whole),
        Column(("guaranteed", "terms"), "guarantee.removed", numbers.whole),
    ]
    return table_of(report.plans, Head("kind", number=False), lambda plan: plan.granularity, columns, "plans[]")

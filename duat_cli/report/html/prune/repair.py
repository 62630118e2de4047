"""Sets before and after repair, and the checkpoint that was written."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.series import level
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.html.prune.sets import many
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import on_page
from duat_cli.report.tables.prune.repair import left_out, repair_columns
from duat_cli.results.prune.repair import RepairedSet
from duat_cli.results.prune.report import PruneReport
from duat_cli.text import plural

_SERIES = (("held_out", "s1", "held-out prompts"), ("chosen_on", "s2", "prompts that chose the sets"))


def repairs(report: PruneReport) -> list[Figure]:
    """A figure a plan that was repaired."""
    return [_figure(report, number) for number, plan in enumerate(report.plans) if plan.repair is not None]


def _figure(report: PruneReport, number: int) -> Figure:
    plan, unit = report.plans[number], report.protocol.unit
    repair = plan.repair
    assert repair is not None
    every = [one for field, _, _ in _SERIES for one in getattr(repair, field)]
    plot = Plot(
        Axis(f"share of {many(plan.granularity)} removed (%)", Linear.over((o.share for o in every), percent=True)),
        Axis(f"mean damage ({unit})", Linear.over([plan.budget, *(v for o in every for v in _means(o))])),
        width=500,
        height=270,
    )
    drawn = [level(plot, plan.budget, "the budget")]
    for field, series, who in _SERIES:
        for one in getattr(repair, field):
            x, (before, after) = plot.x(one.share), map(plot.y, _means(one))
            both = f"{numbers.plain(one.mean_before)}, repaired {numbers.plain(one.mean_after)}"
            said = f"{one.removed} removed, {who}: {both}"
            drawn += [
                marks.interval(x, before, x, after, series),
                marks.dot(x, before, series, said, hollow=True),
                marks.dot(x, after, series, said),
            ]
    tokens = plural(repair.calibration_tokens, "token")
    samples = [
        (kind, series, f"{who}, {word}")
        for field, series, who in _SERIES
        if getattr(repair, field)
        for kind, word in (("hollow dot", "before"), ("dot", "repaired"))
    ]
    return Figure(
        key=f"repair-{plan.granularity.replace(',', '-')}",
        title=f"Removing {many(plan.granularity)}, before and after repair",
        says=f"{plural(repair.refitted, 'layer')} refitted on {tokens} for the plan's set{left_out(plan, repair)}. "
        "Where repair did not lower the damage it was left out, and both are the same.",
        picture=plot.svg(drawn, "Pairs of points: mean damage of a set without repair and with it."),
        tables=[
            _table(getattr(repair, field), f"plans.{number}.repair.{field}[]", who, unit)
            for field, _, who in _SERIES
            if getattr(repair, field)
        ],
        terms=["plans[].repair.held_out[].mean_before", "plans[].repair.held_out[].mean_after", "plans[].repair"],
        legend=[*samples, ("rule", "s1", "budget")],
    )


def _means(one: RepairedSet) -> tuple[float, float]:
    return one.mean_before, one.mean_after


def _table(rows: Sequence[RepairedSet], path: str, who: str, unit: str) -> Table:
    return table_of(rows, Head("prompts", number=False), lambda _: who, on_page(repair_columns(unit)), path)


def written(report: PruneReport) -> Figure | None:
    """The checkpoint that --apply wrote, beside the model it was made of."""
    one = report.written
    if one is None:
        return None
    rows = [
        ["parameters", str(one.parameters_before), str(one.parameters_after)],
        ["bytes", str(one.bytes_before), str(one.bytes_after)],
        ["perplexity", numbers.plain(one.perplexity_before), numbers.plain(one.perplexity_after)],
    ]
    if one.damage is not None:
        rows.append([f"damage, {report.protocol.unit}", "0", numbers.plain(one.damage)])
        rows.append(["prompts above the budget", "0", f"{one.exceeded} of {one.prompts}"])
    if one.parameters_after < one.parameters_before:
        rows.append(["seconds a token", numbers.plain(one.seconds_before), numbers.plain(one.seconds_after)])
    return Figure(
        key="written",
        title=f"The checkpoint that was written, without {one.terms} {many(one.granularity)}",
        says=f"Read back; damage, perplexity and time on {plural(one.prompts, 'prompt')} ({one.measured_on}).",
        tables=[Table([Head("what", number=False), Head("before"), Head("written")], rows)],
        terms=["written.damage", "written.perplexity_after", "written.seconds_after", "written.bytes_after", "written"],
        notes=one.notes,
    )

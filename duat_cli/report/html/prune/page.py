"""The sheet of `duat prune-bound`: sets of terms, with and without repair, and the checkpoint that was written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from duat_cli.grouping import by_key
from duat_cli.kinds import KINDS, NAMES
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, sheet_of, tiles_of
from duat_cli.report.html.drawing.plot import Axis, Plot, dotted, level
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.html.prune.damage import histograms, parts, scatter
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.prune.notable import notable
from duat_cli.report.tables.prune.repair import left_out, repair_columns
from duat_cli.report.tables.prune.rivals import chosen_by, rival_columns, said
from duat_cli.report.tables.prune.sets import PARAMETERS, guarantees, held_out_columns, millions, plan_columns
from duat_cli.results.base import Result
from duat_cli.results.prune.repair import RepairedSet, SetRepair
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import CurvePoint, Plan
from duat_cli.text import plural

_TILES = (
    Column(("loss as it is", "nats a token"), "protocol.loss", numbers.plain),
    Column(("null: uniform", "nats a token"), "protocol.uniform_loss", numbers.plain),
)
_MANY = {**NAMES, "attention": "attention layers"}
_SERIES = (("held_out", "s1", "held-out prompts"), ("chosen_on", "s2", "prompts that chose the sets"))


def prune_sheet(report: PruneReport, beside: Sequence[PruneReport]) -> Sheet:
    said = [text for plan in report.plans for text in guarantees(plan, report)]
    figures = [
        *(_curve(report, number, beside) for number, plan in enumerate(report.plans) if plan.curve),
        *(_rivals(report, number) for number, plan in enumerate(report.plans) if plan.criteria),
        *(_repair(report, number, plan.repair) for number, plan in enumerate(report.plans) if plan.repair),
        _plans(report),
        _written(report),
        scatter(report),
        parts(report, beside),
        histograms(report, beside),
    ]
    lists = [("Notable", notable(report)), ("Guarantee", said)]
    return sheet_of(report, report.prompts, _tiles(report), lists, figures, more=[_protocol(report)])


def _protocol(report: PruneReport) -> str:
    p = report.protocol
    return (
        f"damage: {p.meaning}; a removed term becomes {'zero' if p.ablate == 'zero' else 'its mean'}; "
        f"{plural(p.probes, 'probe')} a prompt"
    )


def _tiles(report: PruneReport) -> list[Tile]:
    unit, budgets = report.protocol.unit, [plan.budget for plan in report.plans[:1]]
    return [
        *(Tile("budget", numbers.plain(budget), unit, "plans.0.budget") for budget in budgets),
        *tiles_of(report, _TILES),
    ]


def _curve(report: PruneReport, number: int, beside: Sequence[PruneReport]) -> Figure:
    plan, unit = report.plans[number], report.protocol.unit
    many = _many(plan.granularity)
    alike = [p for other in beside for p in other.plans if p.granularity == plan.granularity]
    shares, damages = (c.share for p in alike for c in p.curve), (v for p in alike for v in _damages(p))
    plot = _by_share(plan, shares, f"damage ({unit})", damages)
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
    of_curve = on_page(plan_columns(unit), *CurvePoint.model_fields)
    tables = (("curve", plan.curve, of_curve), ("held_out", plan.held_out, on_page(held_out_columns(unit))))
    samples = [("line", "s2", "predicted"), ("line", "s1", "measured, on the prompts that chose the set")]
    samples += [("dot", "s3", "held-out prompts: mean, up to 9 of 10")] if plan.held_out else []
    samples.append(("rule", "s1", "budget"))
    return Figure(
        key=f"curve-{plan.granularity.replace(',', '-')}",
        half=True,
        title=f"Damage against the share of {many} removed, least damaging first",
        says="Sets grow from the least damaging term on. Below the dashed line they are within the budget.",
        picture=plot.svg(drawn, "Lines: predicted and measured damage against the share removed, with the budget."),
        tables=[_table(many, rows, f"plans.{number}.{field}[]", columns) for field, rows, columns in tables if rows],
        terms=["plans[].curve[].predicted", "plans[].curve[].measured", "plans[].guarantee", "plans[].held_out[].mean"],
        legend=samples,
    )


def _by_share(plan: Plan, shares: Iterable[float], title: str, damages: Iterable[float | None]) -> Plot:
    """A plot over the share of terms removed. title: of the upright axis."""
    across = Axis(f"share of {_many(plan.granularity)} removed (%)", Linear.over(shares, percent=True))
    return Plot(across, Axis(title, Linear.over(damages)), width=500, height=270)


def _rivals(report: PruneReport, number: int) -> Figure:
    """A table of the sets that other criteria chose beside two of a plan's sets."""
    plan, unit = report.plans[number], report.protocol.unit
    columns = [
        Column(("beside", "terms"), "beside", numbers.whole),
        Column(("removed", "terms"), "removed", numbers.whole),
        Column(("removed", "parameters"), "parameters", numbers.whole),
        *rival_columns(unit),
        Column(("lowest of a set", unit), "lowest", numbers.plain),
        Column(("highest of a set", unit), "highest", numbers.plain),
    ]
    notes = [
        f"Beside {size}: {text}"
        for size, rows in by_key((one.beside, one) for one in plan.criteria).items()
        for text in said(rows, report.protocol.confidence)
    ]
    return Figure(
        key=f"criteria-{plan.granularity.replace(',', '-')}",
        half=True,
        title=f"Sets of {_many(plan.granularity)} that other criteria choose",
        says=f"Damage on {plural(plan.criteria[0].prompts, 'held-out prompt')} of sets that hold as many parameters.",
        tables=[
            table_of(
                plan.criteria,
                Head("chosen by", number=False),
                chosen_by,
                on_page(columns),
                f"plans.{number}.criteria[]",
            )
        ],
        terms=["plans[].criteria[].mean", "plans[].criteria[].ratio", "plans[].criteria[].allocation"],
        notes=notes,
    )


def _damages(plan: Plan) -> list[float | None]:
    held = [v for one in plan.held_out for v in (one.mean, one.percentile_90)]
    return [plan.budget, *(v for c in plan.curve for v in (c.predicted, c.measured)), *held]


def _table(name: str, rows: Sequence[Result], path: str, columns: Sequence[Column], head: str = "set") -> Table:
    """A table whose rows all have the same name."""
    return table_of(rows, Head(head, number=False), lambda _: name, columns, path)


def _repair(report: PruneReport, number: int, repair: SetRepair) -> Figure:
    plan, unit = report.plans[number], report.protocol.unit
    every = [one for field, _, _ in _SERIES for one in getattr(repair, field)]
    damages = [plan.budget, *(v for one in every for v in _means(one))]
    plot = _by_share(plan, (one.share for one in every), f"mean damage ({unit})", damages)
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
        half=True,
        title=f"Removing {_many(plan.granularity)}, before and after repair",
        says=f"{plural(repair.refitted, 'layer')} refitted on {tokens} for the plan's set{left_out(plan, repair)}. "
        "Where repair did not lower the damage it was left out, and both are the same.",
        picture=plot.svg(drawn, "Pairs of points: mean damage of a set without repair and with it."),
        tables=[
            _table(who, rows, f"plans.{number}.repair.{field}[]", on_page(repair_columns(unit)), "prompts")
            for field, _, who in _SERIES
            if (rows := getattr(repair, field))
        ],
        terms=["plans[].repair.held_out[].mean_before", "plans[].repair.held_out[].mean_after", "plans[].repair"],
        legend=[*samples, ("rule", "s1", "budget")],
    )


def _means(one: RepairedSet) -> tuple[float, float]:
    return one.mean_before, one.mean_after


def _plans(report: PruneReport) -> Figure | None:
    if not report.plans:
        return None
    unit = report.protocol.unit
    columns = [
        *on_page(plan_columns(unit), "removed", "of", "share"),
        *on_page([PARAMETERS]),
        Column(("budget", unit), "budget", numbers.plain),
        *on_page(plan_columns(unit), "predicted", "measured"),
        Column(("saved", "parameters"), "saves.parameters_removed", numbers.whole),
        Column(("saved", "MB"), "saves.bytes_removed", millions),
        Column(("zeroed", "parameters"), "saves.parameters_zeroed", numbers.whole),
        Column(("guaranteed", "terms"), "guarantee.removed", numbers.whole),
    ]
    return Figure(
        key="plans",
        title="The largest set of each kind within the budget"
        if report.plans[0].remove is None
        else "The set of each kind that was asked for",
        says="Measured on the prompts that chose the set; guaranteed: of it, as many terms as held-out prompts allow.",
        tables=[table_of(report.plans, Head("kind", number=False), lambda plan: plan.granularity, columns, "plans[]")],
        terms=["plans[].removed", "plans[].saves.parameters_removed", "plans[].guarantee.removed"],
    )


def _written(report: PruneReport) -> Figure | None:
    one = report.written
    if one is None:
        return None
    rows = [
        ["parameters", str(one.parameters_before), str(one.parameters_after)],
        ["bytes", numbers.decimal(one.bytes_before), numbers.decimal(one.bytes_after)],
        ["perplexity", numbers.plain(one.perplexity_before), numbers.plain(one.perplexity_after)],
    ]
    if one.damage is not None:
        rows.append([f"damage, {report.protocol.unit}", "0", numbers.plain(one.damage)])
        rows.append(["prompts above the budget", "0", f"{one.exceeded} of {one.prompts}"])
    if one.parameters_after < one.parameters_before:
        rows.append(["seconds a token", numbers.plain(one.seconds_before), numbers.plain(one.seconds_after)])
    return Figure(
        key="written",
        half=True,
        title=f"The checkpoint that was written, without {one.terms} {_many(one.granularity)}",
        says=f"Read back; damage, perplexity and time on {plural(one.prompts, 'prompt')} ({one.measured_on}).",
        tables=[Table([Head("what", number=False), Head("before"), Head("written")], rows)],
        terms=["written.damage", "written.perplexity_after", "written.seconds_after", "written.bytes_after", "written"],
        notes=one.notes,
    )


def _many(granularity: str) -> str:
    """Words for the terms of a set, such as neurons and heads."""
    return " and ".join(_MANY[kind] for kind in KINDS if kind in granularity.split(","))

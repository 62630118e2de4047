"""Sets that other criteria choose, on held-out prompts, as text, compared with duat's own and random ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.grouping import by_key
from duat_cli.kinds import names_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, titled_named
from duat_cli.report.tables.page import Page, note
from duat_cli.report.tables.prune.eq16 import ROOMY
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.rivals import CriterionSet
from duat_cli.text import exactly


def rivals(report: PruneReport, page: Page, unit: str) -> list[RenderableType]:
    """Tables for each plan: beside its set and, if there is room, beside the smaller one. unit: for headers."""
    found = list[RenderableType]()
    for plan in report.plans:
        beside = list(by_key((one.beside, one) for one in plan.criteria).items())
        roomy = page.wide or page.width >= ROOMY
        for size, rows in beside if roomy else beside[-1:]:
            title = f"By criterion, sets that hold as much as {size} of {plan.of} {names_of(plan.granularity)}, on "
            title += f"{rows[0].prompts} held-out prompts, {report.protocol.unit}"
            named = [(chosen_by(one), one) for one in rows]
            legend = said(rows, report.protocol.confidence)
            found += titled_named(title, named, rival_columns(unit), page, *legend, head="chosen by")
        if not roomy and len(beside) > 1:
            found.append(note(f"Beside the set of {beside[0][0]}: --wide, or a page of 120 columns."))
    return found


def chosen_by(one: CriterionSet) -> str:
    """Name of a criterion, and how it was used if there is a choice."""
    if one.sets > 1:
        return f"{one.criterion}, {one.sets} sets"
    return f"{one.criterion}, by layer" if one.allocation == "same share of layers" else one.criterion


def said(rows: Sequence[CriterionSet], confidence: float) -> list[str]:
    """A legend: the names, the spread of random sets, and criteria that did better than duat. rows: of one size."""
    found = []
    if any(one.allocation == "same share of layers" for one in rows):
        found.append("by layer: the same share of every layer goes; else all terms are in one order.")
    found += [
        f"{one.criterion}: the mean of a set is {numbers.plain(one.lowest)} to {numbers.plain(one.highest)}."
        for one in rows
        if one.lowest is not None
    ]
    if any(one.ratio is not None for one in rows):
        found.append(f"low, high: {exactly(confidence)} % interval over the prompts.")
    better = [chosen_by(one) for one in rows if one.ratio_high is not None and one.ratio_high < 1]
    if better:
        found.append(f"Less damage than duat's set: {', '.join(better)}.")
    return [" ".join(found)] if found else []


def rival_columns(unit: str) -> list[Column]:
    return [
        Column(("mean", unit), "mean", numbers.plain, ("held-out mean", unit)),
        Column(("9 of 10 at", f"most, {unit}"), "percentile_90", numbers.plain, ("9 of 10 at most", unit)),
        Column(("mean,", "x duat's"), "ratio", numbers.plain),
        Column(("low,", "x duat's"), "ratio_low", numbers.plain),
        Column(("high,", "x duat's"), "ratio_high", numbers.plain),
    ]


TABLES = {"plans[].criteria[].": rival_columns("")}

"""The sheet of `duat prune-bound`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile
from duat_cli.report.html.prune.blocks import histograms, parts
from duat_cli.report.html.prune.scatter import scatter
from duat_cli.report.html.prune.sets import curves, plans, repairs, written
from duat_cli.report.tables import numbers
from duat_cli.report.tables.prune.sets import guarantee, limit, mean_guarantee
from duat_cli.results.prune.report import PruneReport
from duat_cli.text import plural


def prune_sheet(report: PruneReport, beside: Sequence[PruneReport]) -> Sheet:
    """beside: all prune-bound reports of the page, this one among them: they share their axes."""
    said = [text for plan in report.plans for text in (guarantee(plan), *mean_guarantee(plan), *limit(plan))]
    figures = [
        *curves(report, beside),
        *repairs(report),
        _plans(report),
        written(report),
        scatter(report),
        parts(report, beside),
        histograms(report, beside),
    ]
    lists = [("Guarantee", said)]
    return facts.sheet(report, report.prompts, _tiles(report), lists, figures, more=[_protocol(report)])


def _protocol(report: PruneReport) -> str:
    p = report.protocol
    return (
        f"damage: {p.meaning}; a removed term becomes {'zero' if p.ablate == 'zero' else 'its mean'}; "
        f"{plural(p.probes, 'probe')} a prompt"
    )


def _tiles(report: PruneReport) -> list[Tile]:
    p = report.protocol
    found = [Tile("budget", numbers.plain(report.plans[0].budget), p.unit, "plans[].budget")] if report.plans else []
    found += [
        Tile("loss as it is", numbers.plain(p.loss), "nats a token", "protocol.loss"),
        Tile("null: uniform", numbers.plain(p.uniform_loss), "nats a token", "protocol.uniform_loss"),
    ]
    return [tile for tile in found if tile.value != numbers.ABSENT]


def _plans(report: PruneReport) -> Figure | None:
    if not report.plans:
        return None
    return Figure(
        key="plans",
        wide=True,
        title="The largest set of each kind within the budget"
        if report.plans[0].remove is None
        else "The set of each kind that was asked for",
        says="Measured on the prompts that chose the set; guaranteed: of it, as many terms as held-out prompts allow.",
        tables=[plans(report)],
        terms=["plans[].removed", "plans[].saves.parameters_removed", "plans[].guarantee.removed"],
    )

"""The page of `duat check`: what failed first, then by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duat_cli.report.check.words import advice, against, heading, looked_at, number, own, reading, verdict
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.cells import layer_map, place_of
from duat_cli.report.html.drawing.figure import Figure, Sheet, Verdict, noted, tiles_of
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.check import CheckReport, Outcome, UndecidedReport

_TILES = (
    *(Column((status, ""), f"counts.{status}", numbers.whole) for status in ("failed", "warned", "passed", "skipped")),
    Column(("certificate", "relative"), "certificate.relative_error", numbers.error),
    Column(("loss", "nats/token"), "behaviour.loss_per_token", numbers.plain),
    Column(("null: uniform", "nats"), "behaviour.uniform", numbers.plain),
    Column(("null: unigram", "nats/token"), "behaviour.unigram", numbers.plain),
    Column(("entropy", "nats"), "behaviour.entropy", numbers.plain),
    Column(("same predictions as the baseline", "%"), "behaviour.agreement", numbers.percent),
    Column(("KL from the baseline", "nats"), "behaviour.kl", numbers.plain),
    Column(("cosine to the baseline", ""), "behaviour.cosine", numbers.plain),
)
_SHOWN = 8  # how many causes have a table of their own
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
    (Head("measured", path="measured"), lambda one: reading(one).replace("+-", "±") or numbers.ABSENT),
    (Head("least", path="low"), lambda one: number(one.low, one.measured) or numbers.ABSENT),
    (Head("most", path="high"), lambda one: number(one.high, one.measured) or numbers.ABSENT),
    (Head("unit", path="unit", number=False), lambda one: one.unit),
    (Head("threshold's source", path="source", number=False), lambda one: one.source),
    (Head("where to look", path="", number=False), lambda one: f"{one.location.file}:{one.location.line}"),
)
_RULE = "drift.weights"
_SERIES = {"failed": "s4", "warned": "s2", "passed": "s1"}
_RULES = 40
_LEAST = 1e-3  # smallest share of a bound that is drawn; values nearer to the centre are drawn here


def check_sheet(report: CheckReport | UndecidedReport, beside: Sequence[CheckReport | UndecidedReport]) -> Sheet:
    """The sheet: what failed first, then by how much. beside: not used."""
    if isinstance(report, UndecidedReport):
        return Sheet(report.command, report.model or "demo", Verdict("open", "COULD NOT TELL", report.error.message))
    figures = [*_causes(report), _drift(report), _bounds(report), _changes(report), _every(report)]
    word, _, text = verdict(report).partition(": ")
    return Sheet(
        command=report.command,
        name=facts.named(report.model),
        facts=[*looked_at(report), *([against(report.baseline)] if report.baseline is not None else [])],
        verdict=Verdict("good" if report.verdict == "passed" else "bad", word, text),
        tiles=tiles_of(report, _TILES),
        lists=[("Turned off", [", ".join(report.off)] if report.off else []), ("Warnings", report.warnings)],
        figures=[figure for figure in figures if figure is not None],
    )


def _causes(report: CheckReport) -> list[Figure]:
    """A figure for each of the first causes, in the report's order, so that what failed first comes first."""
    found, more = [], len(report.causes) - _SHOWN
    for k, cause in enumerate(report.causes[:_SHOWN]):
        behind = f" {cause.folded[:1].upper()}{cause.folded[1:]}." if cause.folded else ""
        found.append(
            Figure(
                key=f"cause-{k}",
                title=f"{'What was found first: ' if k == 0 else ''}{heading(cause)}",
                says=f"{cause.message}.{behind} {' '.join(advice(own(report, cause)))}".strip(),
                tables=[_outcomes(report, cause.findings)],
                terms=["causes[].origin", "outcomes[].measured", "outcomes[].source"],
                notes=noted(more, "further causes are in the list of all checks.") if k == _SHOWN - 1 else [],
            )
        )
    return found


def _drift(report: CheckReport) -> Figure | None:
    """A map of moved tensors: blocks across, kinds of tensors upwards. None where none moved beyond its tolerance."""
    moved: dict[tuple[str, int | None], float] = {}
    places = []
    for i, one in enumerate(report.outcomes):
        if one.rule == _RULE and one.status in ("failed", "warned") and one.measured is not None and one.where:
            places.append(i)
            moved[place_of(one.where.removeprefix("weights."))] = one.measured
    if not places:
        return None
    picture, left_out = layer_map(moved, "relative change")
    return Figure(
        key="drift",
        title="How far tensors moved from the baseline, by block",
        says="Change relative to the tensor's norm, estimated from the baseline's sketches. Only tensors beyond their "
        "tolerance are listed; an empty cell is within it.",
        picture=picture,
        tables=[_outcomes(report, places)],
        terms=["outcomes[].measured", "outcomes[].source"],
        notes=noted(left_out, "kinds that moved less are in the table."),
    )


def _bounds(report: CheckReport) -> Figure | None:
    """A plot with a point for each outcome with a number and a bound above zero; right of the line it is outside."""
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
            plot.x(ratio), plot.y(rules.index(one.rule)), _SERIES[one.status],
            f"{one.rule}: {ratio:.3g} of its bound; {one.message}",
        )
        for i, ratio in found
        if (one := report.outcomes[i]).rule in rules
    ]  # fmt: skip
    shown = [name for name in _SERIES if any(report.outcomes[i].status == name for i, _ in found)]
    return Figure(
        key="bounds",
        title="How near each measurement is to its bound",
        says="Right of the dashed line a measurement lies outside: above the most that passes, or below the least. "
             "Between two bounds it is the distance from their centre, as a share of half their distance; one of "
             "0.001 and less is drawn at 0.001.",
        picture=plot.svg(drawn, "Points by rule: measurement over bound, on a logarithmic axis."),
        tables=[_outcomes(report, [i for i, _ in found])],
        terms=["outcomes[].measured", "outcomes[].high", "outcomes[].low"],
        legend=[("dot", _SERIES[name], name) for name in shown],
        notes=["Of a single bound, measurements of 0, bounds of 0 and negative numbers have no place on this axis; the "
               "list of all checks has them."],
    )  # fmt: skip


def share(one: Outcome) -> float | None:
    """How near a measurement is to its bound, which is at 1. Between two bounds: |measured - centre| / half the width,
    at least 0.001; with one bound: measured / most, or least / measured. None where that is not positive."""
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


def _changes(report: CheckReport) -> Figure | None:
    """The changes that --update-baseline wrote."""
    if report.baseline is None or not report.baseline.changes:
        return None
    changes = report.baseline.changes
    return Figure(
        key="changes",
        title="What changed in the baseline",
        says=f"{report.baseline.file}: {report.baseline.status}.",
        tables=[
            Table(
                heads=[Head("entry", number=False), Head("before", number=False), Head("now", number=False)],
                rows=[[one.key, one.old or "absent", one.new or "gone"] for one in changes],
            )
        ],
        terms=["baseline.changes"],
    )


def _every(report: CheckReport) -> Figure:
    order = {status: i for i, status in enumerate(_MARKS)}
    places = sorted(range(len(report.outcomes)), key=lambda i: order[report.outcomes[i].status])
    return Figure(
        key="all",
        title="All checks, with their thresholds",
        says="What failed first, then warnings, what passed, and what was skipped with the reason.",
        tables=[_outcomes(report, places)],
        terms=["outcomes[].status", "outcomes[].low", "outcomes[].high"],
    )


def _outcomes(report: CheckReport, places: Sequence[int]) -> Table:
    """A table with a row per outcome. places: their positions in the report's `outcomes`."""
    return table_by("outcomes[]", [report.outcomes[i] for i in places], *_COLUMNS, numbers=places)

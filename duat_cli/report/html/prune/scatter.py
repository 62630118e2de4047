"""Predicted damage against the damage of the real ablation."""

from __future__ import annotations

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Log
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.terms import PruneTerm

_QUALITY = (
    Column(("ablated", "terms"), "n", numbers.whole),
    Column(("of", "terms"), "of", numbers.whole),
    *(
        Column((f"{name}{end}", unit), f"{path}.{part}", numbers.plain)
        for name, path, unit in (
            ("Spearman", "spearman", "-1 to 1"),
            ("Kendall", "kendall", "-1 to 1"),
            ("median predicted / measured", "median_ratio", "factor"),
        )
        for end, part in (("", "value"), (", from", "low"), (", to", "high"))
    ),
    Column(("worst of the ablated", "factor"), "worst_ratio", numbers.plain),
)


def scatter(report: PruneReport) -> Figure | None:
    """A point a term that was removed for real, its shape by kind, with the interval of its prediction."""
    places = [i for i, term in enumerate(report.terms) if term.measured is not None]
    if not places:
        return None
    known = [report.terms[i] for i in places]
    drawable = [(t, x, y) for t in known if (x := t.linearised or 0.0) > 0 and (y := t.measured or 0.0) > 0]
    kinds = list(dict.fromkeys(term.kind for term in known))
    series = {kind: marks.SERIES[n % len(marks.SERIES)] for n, kind in enumerate(kinds)}
    scale = Log.over(v for _, x, y in drawable for v in (x, y))
    unit = report.protocol.unit
    plot = Plot(Axis(f"predicted damage ({unit})", scale), Axis(f"measured damage ({unit})", scale), 560, 420)
    drawn = [marks.rule(plot.left, plot.bottom, plot.right, plot.top, "measured as predicted")]
    drawable.sort(key=lambda one: kinds.index(one[0].kind))
    drawn += [mark for t, _, y in drawable for mark in _interval(plot, scale, t, y, series[t.kind])]
    for term, x, y in drawable:
        said = f"{name(term)}: predicted {numbers.plain(x)}, measured {numbers.plain(y)}"
        drawn.append(marks.dot(plot.x(x), plot.y(y), series[term.kind], said))
    left = len(known) - len(drawable)
    return Figure(
        key="scatter",
        title="Predicted damage against measured damage, term by term",
        says="On the dashed line the ablation did what was predicted. Bars: the prediction's interval.",
        picture=plot.svg(drawn, "Scatter plot, both axes logarithmic, with the line of equal damage."),
        tables=[
            _measured(report, places),
            table_of(
                report.prediction, Head("kind", number=False), lambda one: one.granularity, _QUALITY, "prediction[]"
            ),
            *_criteria(report),
        ],
        terms=["terms[].linearised", "terms[].measured", "prediction[].spearman", "prediction[].criteria"],
        legend=[("dot", series[kind], kind) for kind in kinds],
        notes=[f"{left} terms whose damage is 0 or a gain are in the table alone."] if left else [],
    )


def _interval(plot: Plot, scale: Log, term: PruneTerm, measured: float, series: str) -> list[Mark]:
    """Of the prediction; nothing where it has none that the axis can show."""
    low, high = term.linearised_low, term.linearised_high
    if low is None or high is None or high <= 0:
        return []
    y, ends = plot.y(measured), [plot.x(min(max(end, scale.low), scale.high)) for end in (low, high)]
    return [marks.interval(ends[0], y, ends[1], y, series)]


def name(term: PruneTerm) -> str:
    """A term by its kind, block and index."""
    return f"{term.kind} {term.block}" if term.index is None else f"{term.kind} {term.block}.{term.index}"


def _measured(report: PruneReport, places: list[int]) -> Table:
    unit = report.protocol.unit
    columns = [
        Column(("predicted", unit), "linearised", numbers.plain),
        Column(("from", unit), "linearised_low", numbers.plain),
        Column(("to", unit), "linearised_high", numbers.plain),
        Column(("measured", unit), "measured", numbers.plain),
        Column(("local", "relative"), "local", numbers.plain),
        Column(("frozen", "relative"), "frozen", numbers.plain),
        Column(("certified bound", "norm at a token"), "certified", numbers.plain),
    ]
    terms = [report.terms[i] for i in places]
    return table_of(terms, Head("term", number=False), name, columns, "terms[]", numbers=places)


def _criteria(report: PruneReport) -> list[Table]:
    """Rank correlation with the measured damage of criteria in common use."""
    names = list(dict.fromkeys(criterion for one in report.prediction for criterion in one.criteria))
    if not names:
        return []
    rows = []
    for one in report.prediction:
        found = [one.criteria.get(criterion) for criterion in names]
        rows.append([one.granularity, *(numbers.plain(None if e is None else e.value) for e in found)])
    return [Table([Head("Spearman of", number=False), *(Head(criterion, "-1 to 1") for criterion in names)], rows)]

"""Figures on damage of single terms: by block, its distribution over neurons, and predicted against measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from duat_cli.grouping import by_key
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure, noted
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot, diagonal, dotted
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.report.tables.prune.report import part_columns
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.terms import PruneTerm
from duat_cli.text import plural

_BINS = 4  # bins per power of ten
_PARTS = (("block", "s1"), ("attention", "s2"), ("cross", "s4"), ("ffn", "s3"))


def parts(report: PruneReport, beside: Sequence[PruneReport]) -> Figure | None:
    shown = [part for part in _PARTS if any(getattr(block, part[0]) is not None for block in report.blocks)]
    if not shown:
        return None
    unit = report.protocol.unit
    paths = [path for name, _ in _PARTS for path in (name, f"{name}_measured")]
    ends = [value_at(block, path) for one in beside for block in one.blocks for path in paths]
    plot = Plot(across(report.blocks, most=14), Axis(f"damage ({unit})", Log.over(ends)), width=560, height=420)
    drawn, left = [], 0
    for part, series in shown:
        for path, hollow, word in ((part, False, "predicted"), (f"{part}_measured", True, "measured")):
            known = [(i, v) for i, block in enumerate(report.blocks) if (v := value_at(block, path)) is not None]
            left += sum(v <= 0 for _, v in known)
            points = [(i, v, f"{part} {report.blocks[i].index}, {word}: {numbers.plain(v)}") for i, v in known if v > 0]
            if hollow:
                drawn += [marks.dot(plot.x(i), plot.y(v), series, said, hollow=True) for i, v, said in points]
            else:
                drawn += dotted(plot, points, series)
    samples = [("line", series, f"{part}, predicted") for part, series in shown]
    samples += [("hollow dot", series, f"{part}, measured") for part, series in shown]
    return Figure(
        key="parts",
        half=True,
        title="Damage of removing whole parts: a block, its attention, its FFN",
        says="One at a time. Hollow marks are real ablations, of the parts that were in the sample.",
        picture=plot.svg(drawn, "Points over blocks, on a logarithmic axis."),
        tables=[table_of_blocks(report.blocks, on_page(part_columns(unit)))],
        terms=["blocks[].block", "blocks[].attention", "blocks[].ffn", "blocks[].ffn_measured"],
        legend=samples,
        notes=noted(left, "numbers that are 0 or a gain have no place on this axis."),
    )


def histograms(report: PruneReport, beside: Sequence[PruneReport]) -> Figure | None:
    known = [(t.block, t.linearised) for t in report.terms if t.kind == "neuron" and t.linearised is not None]
    damages = by_key((block, damage) for block, damage in known if damage > 0)
    left = sum(damage <= 0 for _, damage in known)
    if not damages:
        return None
    blocks = sorted(damages, reverse=True)
    unit = report.protocol.unit
    every = [t.linearised for r in beside for t in r.terms if t.kind == "neuron"]
    scale = Log.over(every)
    row = 26 if len(blocks) <= 24 else 14
    plot = Plot(
        Axis(f"predicted damage of one neuron ({unit})", scale),
        Axis("block", Band([str(block) for block in blocks], most=30)),
        height=70 + row * len(blocks),
    )
    counts = {block: Counter(math.floor(_BINS * math.log10(v)) for v in values) for block, values in damages.items()}
    most = max(max(found.values()) for found in counts.values())
    drawn = []
    for place, block in enumerate(blocks):
        base = plot.y(place - 0.5) - 1
        for step, count in sorted(counts[block].items()):
            low, high = 10 ** (step / _BINS), 10 ** ((step + 1) / _BINS)
            left_edge, right_edge = plot.x(max(low, scale.low)), plot.x(min(high, scale.high))
            height = (row - 4) * count / most
            said = f"block {block}: {plural(count, 'neuron')}, {numbers.plain(low)} to {numbers.plain(high)}"
            drawn.append(marks.bar(left_edge, base - height, right_edge - left_edge, height, "s1", said))
    budget = report.plans[0].budget if report.plans else None
    if budget is not None and scale.low <= budget <= scale.high:
        drawn.append(marks.rule(plot.x(budget), plot.top, plot.x(budget), plot.bottom, "the budget"))
    columns = [
        Column(("neurons", "count"), "neurons.count", numbers.whole),
        Column(("median damage", unit), "neurons.median", numbers.plain),
        Column(("largest damage", unit), "neurons.largest", numbers.plain),
        Column(("negligible one by one", "%"), "neurons.negligible_share", numbers.percent),
        Column(("largest certified bound", "norm at a token"), "neurons.certified_largest", numbers.plain),
    ]
    return Figure(
        key="histograms",
        title="How the damage of single neurons is spread, block by block",
        says=f"Each row is a histogram of one block's neurons on a common scale; the tallest bar is "
        f"{plural(most, 'neuron')}. The dashed line is the budget, which all removed terms share.",
        picture=plot.svg(drawn, "Histograms of neurons' predicted damage, a row a block."),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=["terms[].linearised", "blocks[].neurons.negligible_share", "blocks[].neurons.median"],
        notes=[f"{plural(left, 'neuron')} with a predicted damage of 0 or below are in no bar."] if left else [],
    )


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
    """A plot with a point for each term that was really removed, shaped by kind, with its prediction's interval."""
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
    drawn = [diagonal(plot, "measured as predicted")]
    drawable.sort(key=lambda one: kinds.index(one[0].kind))
    drawn += [mark for t, _, y in drawable for mark in _interval(plot, scale, t, y, series[t.kind])]
    for term, x, y in drawable:
        said = f"{name(term)}: predicted {numbers.plain(x)}, measured {numbers.plain(y)}"
        drawn.append(marks.dot(plot.x(x), plot.y(y), series[term.kind], said))
    return Figure(
        key="scatter",
        half=True,
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
        notes=noted(len(known) - len(drawable), "terms whose damage is 0 or a gain are in the table alone."),
    )


def _interval(plot: Plot, scale: Log, term: PruneTerm, measured: float, series: str) -> list[Mark]:
    """The prediction's interval; nothing where there is none that the axis can show."""
    low, high = term.linearised_low, term.linearised_high
    if low is None or high is None or high <= 0:
        return []
    y, ends = plot.y(measured), [plot.x(min(max(end, scale.low), scale.high)) for end in (low, high)]
    return [marks.interval(ends[0], y, ends[1], y, series)]


def name(term: PruneTerm) -> str:
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
    """A table of the rank correlations of criteria in common use with measured damage."""
    names = list(dict.fromkeys(criterion for one in report.prediction for criterion in one.criteria))
    if not names:
        return []
    rows = []
    for one in report.prediction:
        found = [one.criteria.get(criterion) for criterion in names]
        rows.append([one.granularity, *(numbers.plain(None if e is None else e.value) for e in found)])
    return [Table([Head("Spearman of", number=False), *(Head(criterion, "-1 to 1") for criterion in names)], rows)]

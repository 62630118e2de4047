"""Damage by block: whole parts, and how that of neurons is spread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from duat_cli.grouping import by_key
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.series import dotted
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.prune.report import PruneReport
from duat_cli.text import plural

_BINS = 4  # to a power of ten
_PARTS = (("block", "s1"), ("attention", "s2"), ("ffn", "s3"))


def parts(report: PruneReport, beside: Sequence[PruneReport]) -> Figure | None:
    """Points over blocks: removing the block, its attention, its FFN; predicted filled, measured hollow."""
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
    columns = [
        Column((f"{part}, {word}", unit), path, numbers.plain)
        for part, _ in _PARTS
        for word, path in (("predicted", part), ("measured", f"{part}_measured"))
    ]
    samples = [("line", series, f"{part}, predicted") for part, series in shown]
    samples += [("hollow dot", series, f"{part}, measured") for part, series in shown]
    return Figure(
        key="parts",
        title="Damage of removing whole parts: a block, its attention, its FFN",
        says="One at a time. Hollow marks are real ablations, of the parts that were in the sample.",
        picture=plot.svg(drawn, "Points over blocks, on a logarithmic axis."),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=["blocks[].block", "blocks[].attention", "blocks[].ffn", "blocks[].ffn_measured"],
        legend=samples,
        notes=[f"{left} numbers that are 0 or a gain have no place on this axis."] if left else [],
    )


def histograms(report: PruneReport, beside: Sequence[PruneReport]) -> Figure | None:
    """A histogram a block, below each other: how many neurons have which predicted damage."""
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
        wide=True,
        title="How the damage of single neurons is spread, block by block",
        says=f"Each row is a histogram of one block's neurons on a common scale; the tallest bar is "
        f"{plural(most, 'neuron')}. The dashed line is the budget, which all removed terms share.",
        picture=plot.svg(drawn, "Histograms of neurons' predicted damage, a row a block."),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=["terms[].linearised", "blocks[].neurons.negligible_share", "blocks[].neurons.median"],
        notes=[f"{plural(left, 'neuron')} with a predicted damage of 0 or below are in no bar."] if left else [],
    )

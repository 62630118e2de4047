"""How W' moves with the input: by block in three parts, by head, and what reads tokens without a partner."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.blocks import (
    half_wide,
    line_over,
    map_of_heads,
    stacked,
    table_of_blocks,
    table_of_heads,
)
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.compare import BlockComparison, CompareReport

OPERATOR = (
    Column(("change of W'", "%"), "operator.relative", numbers.percent),
    Column(("routing", "%"), "operator.routing", numbers.percent),
    Column(("scale", "%"), "operator.scale", numbers.percent),
    Column(("interaction", "%"), "operator.interaction", numbers.percent),
    Column(("null: uniform attention", "%"), "operator.null.relative", numbers.percent),
    Column(("certificate error", "relative"), "certificate_error", numbers.error),
)
_HEADS = (
    Column(("whole change", "%"), "relative", numbers.percent),
    Column(("routing", "%"), "routing", numbers.percent),
    Column(("scale", "%"), "scale", numbers.percent),
    Column(("interaction", "%"), "interaction", numbers.percent),
    Column(("on unaligned tokens", "%"), "unaligned", numbers.percent),
)
_UNALIGNED = (
    Column(("on unaligned tokens", "%"), "operator.unaligned", numbers.percent),
    Column(("null: uniform attention", "%"), "operator.null.unaligned", numbers.percent),
    Column(("of the first prompt", "%"), "operator.unaligned_a", numbers.percent),
    Column(("of the second", "%"), "operator.unaligned_b", numbers.percent),
)
_PARTS = (
    ("operator.routing", "s1", "routing: where tokens look"),
    ("operator.scale", "s2", "scale: the norms"),
    ("operator.interaction", "s3", "interaction of both"),
)
_POINTS = (
    ("operator.null.relative", "the whole, uniform attention", True),
    ("operator.relative", "the whole change", False),
)
_TITLES = {
    "relative": "The whole change by block and head",
    "routing": "Routing by block and head",
    "scale": "Scale by block and head",
    "interaction": "Interaction by block and head",
}
_SAYS = {
    "relative": "|W'_b - W'_a| of the head's part, over |W'_a| of the same.",
    "routing": "The part that lies in the attention weights H alone.",
    "scale": "The part that lies in the scales S of the norms alone.",
    "interaction": "The part that only the two together make.",
}


def operator(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    """Bars of three parts over blocks, a point for the whole, a hollow one for the null value."""
    if all(block.operator.relative is None for block in blocks):
        return None
    every = [block for other in beside for block in blocks_of(other)]
    about = "Stacked bars over blocks: routing, scale, interaction; points: the whole, its null."
    return Figure(
        key="operator",
        wide=True,
        title="How far W' of each block moves with the input: routing, scale, interaction",
        says="On the aligned tokens. The three add up to the change as matrices; their norms, stacked "
        "here, need not: the point is the norm of the whole, and lies below the bar where parts cancel. The hollow "
        "point is the whole where attention is uniform, so what positions and scales alone make.",
        picture=stacked(blocks, every, _PARTS, "change (% of |W'_a|)", about, _POINTS),
        tables=[table_of_blocks(blocks, OPERATOR, "comparison.blocks[]")],
        terms=[
            "comparison.blocks[].operator.relative",
            *(f"comparison.blocks[].{path}" for path, _, _ in _PARTS),
            "comparison.blocks[].operator.null.relative",
        ],
        legend=[
            *(("bar", series, name) for _, series, name in _PARTS),
            ("dot", "s4", "the whole change"),
            ("hollow dot", "s4", "null: the whole, uniform attention"),
        ],
    )


def blocks_of(report: CompareReport) -> list[BlockComparison]:
    """Its blocks; none with --fixed."""
    return [] if report.comparison is None else report.comparison.blocks


def heads(blocks: Sequence[BlockComparison]) -> list[Figure]:
    """Maps, heads across and blocks upwards: the whole change and its three parts, of one scale of colours."""
    largest = max(
        (v for b in blocks for h in b.heads for c in _HEADS if (v := value_at(h, c.path)) is not None), default=0.0
    )
    if not largest:
        return []
    known = [(place, block, block.heads) for place, block in enumerate(blocks) if block.heads]
    return [
        Figure(
            key=f"heads-{column.path}",
            title=_TITLES[column.path],
            says=_SAYS[column.path],
            picture=map_of_heads(known, column, largest),
            tables=[table_of_heads(known, _HEADS if column is _HEADS[0] else [column], "comparison.blocks[].heads[]")],
            terms=[f"comparison.blocks[].heads[].{column.path}"],
            notes=_without(blocks),
        )
        for column in _HEADS[:4]
    ]


def _without(blocks: Sequence[BlockComparison]) -> list[str]:
    none = [str(block.index) for block in blocks if not block.heads]
    return [f"No heads of W': block {', '.join(none)}."] if none else []


def unaligned(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    """Two lines over blocks."""
    paths = (("operator.unaligned", "s1", "this model"), ("operator.null.unaligned", "s3", "null: uniform attention"))
    every = [value_at(b, path) for r in beside for b in blocks_of(r) for path, _, _ in paths]
    if all(block.operator.unaligned is None for block in blocks):
        return None
    plot = half_wide(blocks, "share of W' (%)", Linear.over(every, percent=True))
    drawn = []
    for path, series, name in paths:
        drawn += line_over(plot, blocks, path, series, name, numbers.share, hollow="null" in path)
    return Figure(
        key="unaligned",
        title="How much of W' reads tokens that the other prompt does not have",
        says="Mean of the two prompts, of the rows of aligned tokens.",
        picture=plot.svg(drawn, "Two lines over blocks: this model, and uniform attention."),
        tables=[table_of_blocks(blocks, _UNALIGNED, "comparison.blocks[]")],
        terms=["comparison.blocks[].operator.unaligned", "comparison.blocks[].operator.null.unaligned"],
        legend=[("hollow line" if "null" in path else "line", series, name) for path, series, name in paths],
    )

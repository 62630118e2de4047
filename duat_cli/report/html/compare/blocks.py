"""Figures on how W' and the stream of each block change with the input, and on reading of tokens without a partner."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import (
    across,
    half_wide,
    lines,
    map_of_heads,
    meanings,
    parts_of_cross,
    stacked,
    table_of_blocks,
    table_of_heads,
)
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot, level
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.compare import BLOCK_COLUMNS, CROSS_COLUMNS
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.results.compare.report import BlockComparison, CompareReport, PairFacts
from duat_cli.text import plural

_CHANGE = on_page(BLOCK_COLUMNS)[:5]
_OPERATOR = (*_CHANGE, Column(("certificate error", "relative"), "certificate_error", numbers.error))
_HEADS = (
    Column(("whole change", "%"), "relative", numbers.percent),
    Column(("routing", "%"), "routing", numbers.percent),
    Column(("scale", "%"), "scale", numbers.percent),
    Column(("interaction", "%"), "interaction", numbers.percent),
    Column(("on unaligned tokens", "%"), "unaligned", numbers.percent),
)
_UNALIGNED = (
    *on_page(BLOCK_COLUMNS, "operator.unaligned", "operator.null.unaligned"),
    Column(("of the first prompt", "%"), "operator.unaligned_a", numbers.percent),
    Column(("of the second", "%"), "operator.unaligned_b", numbers.percent),
)
_PARTS = (
    ("operator.routing", "s1", "routing: where tokens look"),
    ("operator.scale", "s2", "scale: norms and gates"),
    ("operator.interaction", "s3", "interaction of both"),
)
_POINTS = (
    ("operator.null.relative", "s4", "the whole, uniform attention"),
    ("operator.relative", "s4", "the whole change"),
)
_DOTS = [("dot", "s4", "the whole change"), ("hollow dot", "s4", "null: the whole, uniform attention")]
_MAPS = {
    "relative": ("The whole change", "|W'_b - W'_a| of the head's part, over |W'_a| of the same."),
    "routing": ("Routing", "The part that lies in the attention weights H alone."),
    "scale": ("Scale", "The part that lies in the scales S alone, of norms and output gates."),
    "interaction": ("Interaction", "The part that only the two together make."),
}
"""Title and sentence of the map of a column."""
_STREAM = (Column(("input", "%"), "input", numbers.percent), *on_page(BLOCK_COLUMNS, "bias", "ffn", "output"))
_AMPLIFICATION = (
    *on_page(BLOCK_COLUMNS, "amplification"),
    Column(("change of the input", "%"), "input", numbers.percent),
    Column(("change of the output", "%"), "output", numbers.percent),
)
_SERIES = ("s6", "s2", "s3", "s1")  # series for _STREAM
_BY_PAIR = (*_CHANGE, *_STREAM[1:], _AMPLIFICATION[0])
_PAIRS = 5  # how many pairs have a line of their own


def figures_of_blocks(report: CompareReport, beside: Sequence[CompareReport]) -> list[Figure | None]:
    blocks = _blocks_of(report)
    if not blocks:
        return []
    return [
        _operator(blocks, beside),
        _cross(blocks, beside),
        *_heads(blocks),
        _amplification(blocks, beside),
        _stream(blocks, beside),
        _unaligned(blocks, beside),
    ]


def _operator(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    if all(block.operator.relative is None for block in blocks):
        return None
    every = [block for other in beside for block in _blocks_of(other)]
    about = "Stacked bars over blocks: routing, scale, interaction; points: the whole, its null."
    return Figure(
        key="operator",
        title="How far W' of each block moves with the input: routing, scale, interaction",
        says="On the aligned tokens. The three add up to the change as matrices; their norms, stacked "
        "here, need not: the point is the norm of the whole, and lies below the bar where parts cancel. The hollow "
        "point is the whole where attention is uniform, so what positions and scales alone make.",
        picture=stacked(blocks, every, _PARTS, "change (% of |W'_a|)", about, _POINTS),
        tables=[table_of_blocks(blocks, _OPERATOR, "comparison.blocks[]")],
        terms=[
            "comparison.blocks[].operator.relative",
            *(f"comparison.blocks[].{path}" for path, _, _ in _PARTS),
            "comparison.blocks[].operator.null.relative",
        ],
        legend=[*meanings("bar", _PARTS), *_DOTS],
    )


def _cross(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    known = [block for block in blocks if block.cross is not None and block.cross.relative is not None]
    if not known:
        return None
    parts, points = parts_of_cross(_PARTS), parts_of_cross(_POINTS)
    every = [block for other in beside for block in _blocks_of(other) if block.cross is not None]
    about = "Stacked bars over blocks: routing, scale, interaction of cross-attention; points: the whole, its null."
    return Figure(
        key="cross",
        title="How far W'_c of each block moves with the input: what the decoder reads of the encoder",
        says="As above, between the decoder's aligned tokens and those of what the encoder reads.",
        picture=stacked(known, every, parts, "change (% of |W'_c|)", about, points),
        tables=[table_of_blocks(known, on_page(CROSS_COLUMNS), "comparison.blocks[]")],
        terms=["comparison.blocks[].cross.relative", "comparison.blocks[].cross.null.relative"],
        legend=[*meanings("bar", _PARTS), *_DOTS],
    )


def _heads(blocks: Sequence[BlockComparison]) -> list[Figure]:
    """Maps of the whole change and its three parts, with one colour scale; heads across and blocks upwards."""
    largest = max(
        (v for b in blocks for h in b.heads for c in _HEADS if (v := value_at(h, c.path)) is not None), default=0.0
    )
    if not largest:
        return []
    known = [(place, block, block.heads) for place, block in enumerate(blocks) if block.heads]
    return [
        Figure(
            key=f"heads-{column.path}",
            half=True,
            title=f"{_MAPS[column.path][0]} by block and head",
            says=_MAPS[column.path][1],
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


def _amplification(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    if not _any(blocks, "amplification"):
        return None
    every = [block.amplification for r in beside for block in _blocks_of(r)]
    plot = half_wide(blocks, "change out over change in (times)", Linear.over([*every, 1.0]), height=260)
    drawn = [
        level(plot, 1.0, "as large behind the block as in front of it"),
        *lines(plot, blocks, [("amplification", "s1", "amplification")], lambda v: f"{numbers.plain(v)} times"),
    ]
    return Figure(
        key="amplification",
        half=True,
        title="Which blocks raise the relative change: amplification along the depth",
        says="Above the dashed line the relative difference is larger behind the block than in front of it.",
        picture=plot.svg(drawn, "A line over blocks: relative change of the output over that of the input."),
        tables=[table_of_blocks(blocks, _AMPLIFICATION, "comparison.blocks[]")],
        terms=["comparison.blocks[].amplification"],
    )


def _stream(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    known = [(c.path, series, c.name) for c, series in zip(_STREAM, _SERIES, strict=True) if _any(blocks, c.path)]
    if not known:
        return None
    every = [value_at(block, column.path) for r in beside for block in _blocks_of(r) for column in _STREAM]
    plot = half_wide(blocks, "relative change (%)", Linear.over(every, percent=True), height=260)
    drawn = lines(plot, blocks, known, numbers.share)
    return Figure(
        key="stream",
        half=True,
        title="How far the parts of each block move: input, bias, FFN, output",
        says="On the aligned tokens, over the size under the first prompt.",
        picture=plot.svg(drawn, "Lines over blocks: input, bias, FFN, output."),
        tables=[table_of_blocks(blocks, _STREAM, "comparison.blocks[]")],
        terms=[f"comparison.blocks[].{column.path}" for column in _STREAM],
        legend=meanings("line", known),
    )


def _unaligned(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    both = (("operator.unaligned", "s1", "this model"), ("operator.null.unaligned", "s3", "null: uniform attention"))
    every = [value_at(b, path) for r in beside for b in _blocks_of(r) for path, _, _ in both]
    if all(block.operator.unaligned is None for block in blocks):
        return None
    plot = half_wide(blocks, "share of W' (%)", Linear.over(every, percent=True))
    drawn = lines(plot, blocks, both, numbers.share)
    return Figure(
        key="unaligned",
        half=True,
        title="How much of W' reads tokens that the other prompt does not have",
        says="Mean of the two prompts, of the rows of aligned tokens.",
        picture=plot.svg(drawn, "Two lines over blocks: this model, and uniform attention."),
        tables=[table_of_blocks(blocks, _UNALIGNED, "comparison.blocks[]")],
        terms=["comparison.blocks[].operator.unaligned", "comparison.blocks[].operator.null.unaligned"],
        legend=meanings("line", both),
    )


def by_pair(report: CompareReport) -> Figure | None:
    """A figure on the change of W' for each pair, with --per-prompt."""
    known = [(number, pair) for number, pair in enumerate(report.pairs) if pair.blocks]
    kept = known[:_PAIRS]
    if len(known) < 2:
        return None
    blocks = kept[0][1].blocks or []
    every = [block.operator.relative for _, pair in kept for block in pair.blocks or []]
    plot = Plot(across(blocks, most=12), Axis("change (% of |W'_a|)", Linear.over(every, percent=True)))
    drawn = []
    for series, (number, pair) in zip(marks.SERIES, kept, strict=False):
        drawn += lines(plot, pair.blocks or [], [("operator.relative", series, f"pair {number}")], numbers.share)
    left = len(known) - len(kept)
    return Figure(
        key="pairs-blocks",
        title="The change of W' pair by pair",
        says="The pictures above are means over the pairs.",
        picture=plot.svg(drawn, "A line over blocks for each pair."),
        tables=[
            table_of_blocks(pair.blocks or [], _BY_PAIR, f"pairs.{number}.blocks[]", label=f"pair {number}, block")
            for number, pair in kept
        ],
        terms=["pairs[].blocks"],
        legend=[
            ("line", series, f"pair {number}: {named(report, pair)}")
            for series, (number, pair) in zip(marks.SERIES, kept, strict=False)
        ],
        notes=[f"{plural(left, 'more pair')}: in the JSON."] if left > 0 else [],
    )


def named(report: CompareReport, pair: PairFacts) -> str:
    return f"{report.prompts[pair.a].label} and {report.prompts[pair.b].label}"


def _blocks_of(report: CompareReport) -> list[BlockComparison]:
    """The blocks of a report; none with --fixed."""
    return [] if report.comparison is None else report.comparison.blocks


def _any(blocks: Sequence[BlockComparison], path: str) -> bool:
    return any(value_at(block, path) is not None for block in blocks)

"""What the difference of two prompts does along the depth: biases, FFNs, outputs, and how each block amplifies it."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.compare.operator import OPERATOR, blocks_of
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, half_wide, line_over, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.series import level
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.compare import BlockComparison, CompareReport, PairFacts
from duat_cli.text import plural

_STREAM = (
    Column(("input", "%"), "input", numbers.percent),
    Column(("bias b'", "%"), "bias", numbers.percent),
    Column(("FFN f", "%"), "ffn", numbers.percent),
    Column(("output", "%"), "output", numbers.percent),
)
_AMPLIFICATION = (
    Column(("amplification", "times"), "amplification", numbers.plain),
    Column(("change of the input", "%"), "input", numbers.percent),
    Column(("change of the output", "%"), "output", numbers.percent),
)
_SERIES = ("s6", "s2", "s3", "s1")  # of _STREAM
_BY_PAIR = (*OPERATOR[:5], *_STREAM[1:], _AMPLIFICATION[0])
_PAIRS = 5  # with a line of their own


def stream(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    """Lines over blocks: the relative change of the input, the bias, the FFN's term and the output."""
    known = [(column, series) for column, series in zip(_STREAM, _SERIES, strict=True) if _any(blocks, column.path)]
    if not known:
        return None
    every = [value_at(block, column.path) for r in beside for block in blocks_of(r) for column in _STREAM]
    plot = half_wide(blocks, "relative change (%)", Linear.over(every, percent=True), height=260)
    drawn = []
    for column, series in known:
        drawn += line_over(plot, blocks, column.path, series, column.name, numbers.share)
    return Figure(
        key="stream",
        title="How far the parts of each block move: input, bias, FFN, output",
        says="On the aligned tokens, over the size under the first prompt.",
        picture=plot.svg(drawn, "Lines over blocks: input, bias, FFN, output."),
        tables=[table_of_blocks(blocks, _STREAM, "comparison.blocks[]")],
        terms=[f"comparison.blocks[].{column.path}" for column in _STREAM],
        legend=[("line", series, column.name) for column, series in known],
    )


def amplification(blocks: Sequence[BlockComparison], beside: Sequence[CompareReport]) -> Figure | None:
    """A line over blocks, and 1 to compare with."""
    if not _any(blocks, "amplification"):
        return None
    every = [block.amplification for r in beside for block in blocks_of(r)]
    plot = half_wide(blocks, "change out over change in (times)", Linear.over([*every, 1.0]), height=260)
    drawn = [
        level(plot, 1.0, "as large behind the block as in front of it"),
        *line_over(plot, blocks, "amplification", "s1", "amplification", lambda v: f"{numbers.plain(v)} times"),
    ]
    return Figure(
        key="amplification",
        title="Which blocks drive the two prompts apart: amplification along the depth",
        says="Above the dashed line the relative difference is larger behind the block than in front of it.",
        picture=plot.svg(drawn, "A line over blocks: relative change of the output over that of the input."),
        tables=[table_of_blocks(blocks, _AMPLIFICATION, "comparison.blocks[]")],
        terms=["comparison.blocks[].amplification"],
    )


def by_pair(report: CompareReport) -> Figure | None:
    """With --per-prompt: the change of W' of each pair."""
    known = [(number, pair) for number, pair in enumerate(report.pairs) if pair.blocks]
    kept = known[:_PAIRS]
    if len(known) < 2:
        return None
    blocks = kept[0][1].blocks or []
    every = [block.operator.relative for _, pair in kept for block in pair.blocks or []]
    plot = Plot(across(blocks, most=12), Axis("change (% of |W'_a|)", Linear.over(every, percent=True)))
    drawn = []
    for series, (number, pair) in zip(marks.SERIES, kept, strict=False):
        drawn += line_over(plot, pair.blocks or [], "operator.relative", series, f"pair {number}", numbers.share)
    left = len(known) - len(kept)
    return Figure(
        key="pairs-blocks",
        wide=True,
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
    """Which prompts a pair is."""
    return f"{report.prompts[pair.a].label} and {report.prompts[pair.b].label}"


def _any(blocks: Sequence[BlockComparison], path: str) -> bool:
    return any(value_at(block, path) is not None for block in blocks)

"""What the linear path, the biases and the UAT terms make of the stream behind each block."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot, legend
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.series import stack
from duat_cli.report.html.drawing.table import table_of
from duat_cli.report.html.inspect.columns import SHARES, block_name
from duat_cli.report.tables import numbers
from duat_cli.results.inspect import Block, InspectReport

_PARTS = (
    ("linear", "s1", "linear: the input's path"),
    ("static", "s2", "static: biases"),
    ("dynamic", "s3", "UAT terms"),
)


def shares(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """Bars stacked over blocks; what is below zero points against the stream and hangs below the line."""
    if not report.blocks:
        return None
    heights = [total for other in beside for block in other.blocks for total in _ends(block)]
    plot = Plot(
        Axis("block", Band([str(block.index) for block in report.blocks])),
        Axis("share of the block's output (%)", Linear.over([*heights, 1.0], percent=True)),
    )
    drawn = []
    for place, block in enumerate(report.blocks):
        found = [(getattr(block.terms, part).share, series, name) for part, series, name in _PARTS]
        said = f"block {block.index}, "
        drawn += stack(plot, place, [(v, s, f"{said}{name}: {numbers.percent(v)} %") for v, s, name in found])
    names = ", ".join(name for _, _, name in _PARTS)
    return Figure(
        key="shares",
        wide=True,
        title="What makes the stream behind each block: linear, static and UAT parts",
        says="Everything up to a block's output, split exactly; the three shares sum to 100 %. A share below zero "
        "points against the stream.",
        picture=plot.svg(drawn, f"Stacked bars over {numbers.plural(len(report.blocks), 'block')}: {names}."),
        tables=[table_of(report.blocks, "block", block_name, SHARES, "blocks[].", "block")],
        terms=[
            *(f"blocks[].terms.{part}" for part, _, _ in _PARTS),
            "blocks[].terms.linear.share",
            "blocks[].terms.own",
        ],
        legend=legend([(marks.sample("bar", series), name) for _, series, name in _PARTS]),
    )


def _ends(block: Block) -> tuple[float, float]:
    """How far a block's bar goes below and above zero."""
    values = [value for part, _, _ in _PARTS if (value := getattr(block.terms, part).share) is not None]
    return sum(min(v, 0.0) for v in values), sum(max(v, 0.0) for v in values)

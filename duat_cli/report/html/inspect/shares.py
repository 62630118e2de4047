"""What the linear path, the biases and the UAT terms make of the stream behind each block."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, ends, stacked, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot, legend
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import has_encoder
from duat_cli.report.tables.grid import Column
from duat_cli.results.inspect import InspectReport
from duat_cli.text import plural

_COLUMNS = (
    Column(("linear", "%"), "terms.linear.share", numbers.percent),
    Column(("static", "%"), "terms.static.share", numbers.percent),
    Column(("encoder", "%"), "terms.encoder.share", numbers.percent),
    Column(("UAT terms", "%"), "terms.dynamic.share", numbers.percent),
    Column(("of these the block's own", "%"), "terms.own.share", numbers.percent),
    Column(("norm of the linear part", "of the output's"), "terms.linear.norm", numbers.plain),
    Column(("norm of the static part", "of the output's"), "terms.static.norm", numbers.plain),
    Column(("norm of the UAT part", "of the output's"), "terms.dynamic.norm", numbers.plain),
)
_PARTS = (
    ("terms.linear.share", "s1", "linear: the input's path"),
    ("terms.static.share", "s2", "static: biases"),
    ("terms.dynamic.share", "s3", "UAT terms"),
    ("terms.encoder.share", "s4", "the encoder's states"),
)


def shares(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """Bars stacked over blocks; what is below zero points against the stream and hangs below the line."""
    if not report.blocks:
        return None
    heights = [total for other in beside for block in other.blocks for total in ends(block, _PARTS)]
    plot = Plot(
        across(report.blocks),
        Axis("share of the block's output (%)", Linear.over([*heights, 1.0], percent=True)),
    )
    drawn = []
    for place, block in enumerate(report.blocks):
        drawn += stacked(plot, place, block, _PARTS)
    present = [part for part in _PARTS if part[0] != "terms.encoder.share" or has_encoder(report)]
    names = ", ".join(name for _, _, name in present)
    columns = [c for c in _COLUMNS if has_encoder(report) or not c.path.startswith("terms.encoder")]
    return Figure(
        key="shares",
        wide=True,
        title="What makes the stream behind each block: linear, static and UAT parts",
        says="Everything up to a block's output, split exactly; the shares sum to 100 %. A share below zero "
        "points against the stream.",
        picture=plot.svg(drawn, f"Stacked bars over {plural(len(report.blocks), 'block')}: {names}."),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=[
            *(f"blocks[].{path.removesuffix('.share')}" for path, _, _ in present),
            "blocks[].terms.linear.share",
            "blocks[].terms.own",
        ],
        legend=legend([(marks.sample("bar", series), name) for _, series, name in present]),
    )

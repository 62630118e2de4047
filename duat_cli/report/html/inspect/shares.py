"""What the linear path, the biases and the UAT terms make of the stream behind each block; and with --terms every term
of the sum of the last block's output."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.blocks import stacked, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.series import stack
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import COLUMNS, has_encoder
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.inspect import TERM_COLUMNS
from duat_cli.results.inspect import InspectReport
from duat_cli.text import plural

_COLUMNS = (
    *on_page(column for column in COLUMNS if column.path.startswith("terms.")),
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
_TERM = on_page(TERM_COLUMNS)
_BEFORE = tuple(
    Column((name, "%"), f"terms.pre_activation.{part}.share", numbers.percent)
    for part, name in (("linear", "linear"), ("static", "static"), ("dynamic", "UAT terms"))
)
_SERIES = {"linear": "s1", "static": "s2", "dynamic": "s3", "encoder": "s4"}


def shares(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """Bars stacked over blocks; what is below zero points against the stream and hangs below the line."""
    if not report.blocks:
        return None
    every = [block for other in beside for block in other.blocks]
    present = [part for part in _PARTS if part[0] != "terms.encoder.share" or has_encoder(report)]
    names = ", ".join(name for _, _, name in present)
    about = f"Stacked bars over {plural(len(report.blocks), 'block')}: {names}."
    columns = [c for c in _COLUMNS if has_encoder(report) or not c.path.startswith("terms.encoder")]
    return Figure(
        key="shares",
        wide=True,
        title="What makes the stream behind each block: linear, static and UAT parts",
        says="Everything up to a block's output, split exactly; the shares sum to 100 %. A share below zero "
        "points against the stream.",
        picture=stacked(report.blocks, every, _PARTS, "share of the block's output (%)", about, least=1.0),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=[
            *(f"blocks[].{path.removesuffix('.share')}" for path, _, _ in present),
            "blocks[].terms.linear.share",
            "blocks[].terms.own",
        ],
        legend=[("bar", series, name) for _, series, name in present],
    )


def terms(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """A bar a term."""
    if not report.terms:
        return None
    every = [term.share for other in beside for term in other.terms or []]
    plot = Plot(
        Axis("term of the sum", Band([t.name if t.block is None else str(t.block) for t in report.terms], most=14)),
        Axis("share of the last output (%)", Linear.over(every, percent=True)),
    )
    drawn = []
    for place, term in enumerate(report.terms):
        said = f"{term.name}: {numbers.percent(term.share)} %"
        drawn += stack(plot, place, [(term.share, _SERIES[term.kind], said)])
    return Figure(
        key="terms",
        wide=True,
        title="What each term of the sum makes of the last block's output",
        says="x_0 is the linear path from the first block's input, bias all static parts together, a number the UAT "
        "term that this block's FFN makes. All shares sum to 100 %.",
        picture=plot.svg(drawn, "A bar for each term of the sum."),
        tables=[
            table_of(report.terms, Head("term", number=False), lambda term: term.name, _TERM, "terms[]", "term"),
            table_of_blocks(report.blocks, _BEFORE),
        ],
        terms=["terms[].share", "blocks[].terms.pre_activation"],
    )

"""What every term of the sum makes of the last block's output, with --terms."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.blocks import table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.series import stack
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.inspect import InspectReport

_COLUMNS = (
    Column(("share", "%"), "share", numbers.percent),
    Column(("norm", "of the output's"), "norm", numbers.plain),
)
_BEFORE = tuple(
    Column((name, "%"), f"terms.pre_activation.{part}.share", numbers.percent)
    for part, name in (("linear", "linear"), ("static", "static"), ("dynamic", "UAT terms"))
)
_SERIES = {"linear": "s1", "static": "s2", "dynamic": "s3", "encoder": "s4"}


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
    before = table_of_blocks(report.blocks, _BEFORE)
    return Figure(
        key="terms",
        wide=True,
        title="What each term of the sum makes of the last block's output",
        says="x_0 is the linear path from the first block's input, bias all static parts together, a number the UAT "
        "term that this block's FFN makes. All shares sum to 100 %.",
        picture=plot.svg(drawn, "A bar for each term of the sum."),
        tables=[
            table_of(report.terms, Head("term", number=False), lambda term: term.name, _COLUMNS, "terms[]", "term"),
            before,
        ],
        terms=["terms[].share", "blocks[].terms.pre_activation"],
    )

"""Where the attention matrices come from, with --routing."""

from __future__ import annotations

from duat_cli.report.html.drawing.blocks import half_wide, line_over, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import on_page
from duat_cli.report.tables.inspect import ROUTING_COLUMNS
from duat_cli.results.inspect import InspectReport

_COLUMNS = on_page(sorted(ROUTING_COLUMNS, key=lambda column: not column.path.startswith("routing.r2")))
_LINES = ((_COLUMNS[0], "s2"), (_COLUMNS[1], "s3"), (_COLUMNS[2], "s1"))


def routing(report: InspectReport) -> Figure | None:
    """Lines over blocks: what the scores of attention are explained by."""
    if all(block.routing is None for block in report.blocks):
        return None
    plot = half_wide(report.blocks, "share of the scores' variance (%)", Linear(0, 1, percent=True))
    drawn = []
    for column, series in _LINES:
        drawn += line_over(plot, report.blocks, column.path, series, column.name, numbers.share)
    return Figure(
        key="routing",
        title="What the scores of attention are explained by",
        says="R^2 of the scores before the softmax, mean over heads. What W_QK leaves is positions and biases.",
        picture=plot.svg(drawn, "Three lines over blocks: by x.x, by the covariance of tokens, by W_QK."),
        tables=[table_of_blocks(report.blocks, _COLUMNS)],
        terms=[f"blocks[].{column.path}" for column in _COLUMNS],
        legend=[("line", series, column.name) for column, series in _LINES],
    )

"""Where the attention matrices come from, with --routing."""

from __future__ import annotations

from duat_cli.report.html.drawing.blocks import half_wide, line_over, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.inspect import InspectReport

_COLUMNS = (
    Column(("by x.x", "%"), "routing.r2_plain", numbers.percent),
    Column(("by the covariance", "%"), "routing.r2_centred", numbers.percent),
    Column(("by W_QK", "%"), "routing.r2_bilinear", numbers.percent),
    Column(("stable rank of W_QK", "dimensions"), "routing.stable_rank", numbers.plain),
    Column(("symmetric share", "0-1"), "routing.symmetric_share", numbers.plain),
    Column(("H rebuilt, error", "relative"), "routing.rebuilt_error", numbers.error),
)
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

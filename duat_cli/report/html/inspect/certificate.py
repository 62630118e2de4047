"""How far every block's rebuilt output is from the model's own."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import half_wide, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.scales import Log
from duat_cli.report.html.drawing.series import level
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.inspect import InspectReport

_COLUMNS = (
    Column(("certificate error", "relative"), "certificate_error", numbers.error),
    Column(("error of W' factors", "relative"), "operator.certificate_error", numbers.error),
    Column(("largest activation", "as stored"), "range.largest_activation", numbers.plain),
    Column(("of the dtype's largest", "%"), "range.share", numbers.percent),
)


def certificate(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """Errors by block against the tolerance; an error of exactly zero has no place on the axis and is only in the
    table."""
    if not report.blocks:
        return None
    errors = [block.certificate_error for block in report.blocks]
    every = [b.certificate_error for r in beside for b in r.blocks] + [r.certificate.tolerance for r in beside]
    plot = half_wide(report.blocks, "relative error of the output", Log.over(every))
    drawn = [level(plot, report.certificate.tolerance, f"tolerance {report.certificate.tolerance:.0e}")]
    drawn += [
        marks.dot(plot.x(i), plot.y(e), "s1", f"block {report.blocks[i].index}: {numbers.error(e)}")
        for i, e in enumerate(errors)
        if e > 0
    ]
    notes = ["Blocks whose error is 0 have no place on this axis."] if not all(errors) else []
    return Figure(
        key="certificate",
        title="How exact each block is: its rebuilt output against the model's own",
        says="The largest over the prompts. What stands below the dashed line is within the arithmetic's tolerance.",
        picture=plot.svg(drawn, "Relative error of every block, and the tolerance."),
        tables=[table_of_blocks(report.blocks, _COLUMNS)],
        terms=["blocks[].certificate_error", "certificate.plain_error", "certificate.tolerance"],
        legend=[("dot", "s1", "relative error"), ("rule", "s1", "tolerance")],
        notes=notes,
    )

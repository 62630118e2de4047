"""The sheet of `duat matrix --network`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile
from duat_cli.report.html.drawing.plot import Axis, Plot, curve, level
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import on_page
from duat_cli.report.tables.matrix import LAYER_COLUMNS
from duat_cli.results.matrix import NetworkReport

_COLUMNS = on_page(LAYER_COLUMNS)
_LINES = ((_COLUMNS[1], "s2"), (_COLUMNS[2], "s3"), (_COLUMNS[3], "s1"))


def network_sheet(report: NetworkReport, beside: Sequence[NetworkReport]) -> Sheet:
    tiles = [
        Tile("Eq. 33, from the matrices alone", numbers.error(report.whole_error), "relative", "whole_error"),
        Tile("side of W'_{j,1}", str(report.side), "", "side"),
    ]
    size = f"N = {report.tokens}, M = {report.hidden_size}: W'_{{j,1}} is {report.side} x {report.side}"
    lists = [("Not as in the paper", report.deviations)]
    return facts.sheet(report, [report.prompt], tiles, lists, [_layers(report, beside)], more=[size])


def _layers(report: NetworkReport, beside: Sequence[NetworkReport]) -> Figure:
    """Errors over layers; what is exactly zero has no place on the axis."""
    rows = report.layers
    every = [column.value(row) for one in beside for row in one.layers for column, _ in _LINES]
    plot = Plot(
        Axis("layer j", Band([str(row.layer) for row in rows])),
        Axis("relative error", Log.over([*every, *(one.certificate.tolerance for one in beside)])),
    )
    drawn = [level(plot, report.certificate.tolerance, f"tolerance {report.certificate.tolerance:.0e}")]
    layers = [f"layer {row.layer}" for row in rows]
    for column, series in _LINES:
        values = [column.value(row) or None for row in rows]
        drawn += curve(plot, values, series, layers, column.name, numbers.error)
    return Figure(
        key="layers",
        wide=True,
        title="How exact the network of the paper's matrices is, layer by layer",
        says="x'_j = W'_{j,1} x'_0 + b'_{j,3} + sum_k W'_{k,3} sigma(W'_{k,2} x'_0 + b'_{k,2}) with sigma live, "
        "against the model's own values.",
        picture=plot.svg(drawn, "Lines of errors over layers, and the tolerance."),
        tables=[
            table_of(
                rows, Head("layer", number=False), lambda row: f"{row.layer} (Eq. {row.equation})", _COLUMNS, "layers[]"
            )
        ],
        terms=[f"layers[].{column.path}" for column, _ in _LINES],
        legend=[*(("line", series, column.name) for column, series in _LINES), ("rule", "s1", "tolerance")],
        notes=["An error of 0 has no place on this axis."] if 0 in every else [],
        opened=True,
    )

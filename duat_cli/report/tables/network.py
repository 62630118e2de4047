"""`duat matrix --network` as text for a terminal: the equations layer by layer, and how far each is from the model."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import Column, Labels, missing, spaced
from duat_cli.report.tables.page import BLANK, Page, line
from duat_cli.results.matrix import NetworkLayer, NetworkReport
from duat_cli.text import plural

_LABELS = Labels(("layer", "j"), lambda row: f"{row.layer} (Eq. {row.equation})", False)
_COLUMNS = [
    Column(("neurons", "/ token"), "neurons", numbers.whole),
    Column(("sigma reads", "rel. error"), "pre_activation_error", numbers.error),
    Column(("FFN gives", "rel. error"), "unit_error", numbers.error),
    Column(("x_j", "rel. error"), "output_error", numbers.error),
]
TABLES = {"layers[].": _COLUMNS}


def render_network(report: NetworkReport, page: Page) -> str:
    """A row a layer, Eq. 33 from the matrices alone, the certificate, and where the model is not the paper's."""
    parts: list[RenderableType] = [
        *facts.loaded(report.model, [report.prompt], report.environment),
        line(_case(report)),
        BLANK,
        line("x'_j = W'_{j,1} x'_0 + b'_{j,3} + sum_k W'_{k,3} sigma(W'_{k,2} x'_0 + b'_{k,2}), sigma live", "bold"),
        *spaced(report.layers, _LABELS, _COLUMNS, page),
        BLANK,
        line(
            "Against the model's own values: sigma reads W'_{j,2} x'_0 + b'_{j,2} (Eq. 34); what the FFN then gives; "
            "x_j.",
            "dim",
        ),
        *facts.absences(missing(report.layers, _COLUMNS, [row.layer for row in report.layers]), "layer"),
        BLANK,
        line(f"Eq. 33 from the matrices alone, every W'_{{j,3}} made: {numbers.error(report.whole_error)} from x_L"),
        facts.verdict(report.certificate),
        *facts.section("Not as in the paper", report.deviations),
        *facts.remarks(report.skipped, report.warnings),
    ]
    return page.render(parts)


def _case(report: NetworkReport) -> str:
    kinds = dict.fromkeys(_sigma(layer) for layer in report.layers if layer.activation is not None)
    sigma = f"; sigma: {', '.join(kinds)}" if kinds else ""
    return (
        f"{plural(len(report.layers), 'layer')}, N = {report.tokens}, M = {report.hidden_size}: "
        f"W'_{{j,1}} is {report.side} x {report.side}{sigma}"
    )


def _sigma(layer: NetworkLayer) -> str:
    name = f"{layer.activation}(gate) o up" if layer.gated else str(layer.activation)
    return name if layer.experts is None else f"{name} in {plural(layer.experts, 'expert')} a token"

"""`duat verify` as text for a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import Column, Labels, grids
from duat_cli.report.tables.page import Page, line
from duat_cli.results.inspect import BlockCertificate, VerifyReport

_LABELS = Labels(("block",), lambda row: str(row.index) if isinstance(row, BlockCertificate) else "")
_COLUMNS = [
    Column(("block", "output", "relative"), "certificate_error", numbers.error),
    Column(("operator", "W'", "relative"), "operator_error", numbers.error),
]
TABLES = {"blocks[].": _COLUMNS}


def render_verify(report: VerifyReport, page: Page) -> str:
    """What was loaded, the errors of every block, the certificate."""
    tables = grids(report.blocks, _LABELS, _COLUMNS, page) if report.blocks else []
    parts: list[RenderableType] = [
        *facts.loaded(report.model, report.prompts, report.environment),
        *(part for table in tables for part in (Text(""), table)),
        Text(""),
        line(
            "block output: |x - rebuilt| / |x|; operator W': residual of its factors.",
            "dim",
        ),
        *_notes(report.blocks),
        Text(""),
        facts.verdict(report.certificate),
        *facts.remarks(report),
    ]
    return page.render(parts)


def _notes(blocks: list[BlockCertificate]) -> list[RenderableType]:
    """Why an operator has no error."""
    reasons: dict[str, list[int]] = {}
    for block in blocks:
        if block.operator_error is None:
            reasons.setdefault(block.operator_reason or "no reason was given", []).append(block.index)
    return facts.absences([("operator W'", reason, at) for reason, at in reasons.items()], "block")

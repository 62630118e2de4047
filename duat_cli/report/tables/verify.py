"""`duat verify` as text for a terminal."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, Column, spaced
from duat_cli.report.tables.page import BLANK, Page, line
from duat_cli.results.inspect import BlockCertificate, VerifyReport

_COLUMNS = [
    Column(("block", "output", "relative"), "certificate_error", numbers.error),
    Column(("operator", "W'", "relative"), "operator_error", numbers.error),
]
_CROSS = Column(("second", "W'_c", "relative"), "cross_error", numbers.error)
TABLES = {"blocks[].": [*_COLUMNS, _CROSS]}


def render_verify(report: VerifyReport, page: Page) -> str:
    """What was loaded, the errors of every block, the certificate."""
    crossing = any(block.cross_error is not None or block.cross_reason is not None for block in report.blocks)
    columns = [*_COLUMNS, _CROSS] if crossing else _COLUMNS
    return page.render(
        *facts.loaded(report.model, report.prompts, report.environment),
        *(spaced(report.blocks, BLOCK, columns, page) if report.blocks else []),
        BLANK,
        line(
            "block output: |x - rebuilt| / |x|; operator W': residual of its factors."
            + (
                " W'_c: of cross-attention's, over the encoder's states, or of a mixer's beside attention."
                if crossing
                else ""
            ),
            "dim",
        ),
        *_notes(report.blocks),
        BLANK,
        facts.verdict(report.certificate),
        *facts.remarks(report.skipped, report.warnings),
    )


def _notes(blocks: list[BlockCertificate]) -> list[RenderableType]:
    """Why an operator has no error."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for block in blocks:
        if block.operator_error is None:
            why = block.operator_reason or "no reason was given"
            reasons.setdefault(("operator W'", why), []).append(block.index)
        if block.cross_reason is not None:
            reasons.setdefault(("second operator W'_c", block.cross_reason), []).append(block.index)
    return facts.absences([(what, reason, at) for (what, reason), at in reasons.items()], "block")

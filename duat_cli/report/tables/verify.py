"""`duat verify` as text for a terminal."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.grouping import by_key
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, NO_REASON, Column, spaced
from duat_cli.report.tables.page import BLANK, Page, note
from duat_cli.results.inspect import BlockCertificate, VerifyReport

_COLUMNS = [
    Column(("block", "output", "relative"), "certificate_error", numbers.error),
    Column(("operator", "W'", "relative"), "operator_error", numbers.error),
]
_CROSS = Column(("second", "W'_c", "relative"), "cross_error", numbers.error)
TABLES = {"blocks[].": [*_COLUMNS, _CROSS]}


def render_verify(report: VerifyReport, page: Page) -> str:
    """The report as text: what was loaded, the errors of every block, the certificate."""
    crossing = any(block.cross_error is not None or block.cross_reason is not None for block in report.blocks)
    columns = [*_COLUMNS, _CROSS] if crossing else _COLUMNS
    return page.render(
        *facts.loaded(report.model, report.prompts, report.environment),
        *(spaced(report.blocks, BLOCK, columns, page) if report.blocks else []),
        BLANK,
        note(
            "block output: |x - rebuilt| / |x|; operator W': residual of its factors."
            + (
                " W'_c: of cross-attention's, over the encoder's states, or of a mixer's beside attention."
                if crossing
                else ""
            )
        ),
        *_notes(report.blocks),
        BLANK,
        facts.verdict(report.certificate),
        *facts.remarks(report.skipped, report.warnings),
    )


def _notes(blocks: list[BlockCertificate]) -> list[RenderableType]:
    """Section on why operators have no error."""
    absent = [(("operator W'", b.operator_reason or NO_REASON), b.index) for b in blocks if b.operator_error is None]
    absent += [(("second operator W'_c", b.cross_reason), b.index) for b in blocks if b.cross_reason is not None]
    return facts.absences([(what, why, at) for (what, why), at in by_key(absent).items()], "block")

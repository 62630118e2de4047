"""The coupling map C of one block under one prompt. The page's script draws it from the report that the page holds."""

from __future__ import annotations

from duat_cli.report.html.drawing.elements import tag
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.results.inspect import CouplingMap, InspectReport
from duat_cli.text import plural


def coupling(report: InspectReport) -> Figure | None:
    """A canvas and what steers it; None where the report has no maps."""
    if not report.maps:
        return None
    return Figure(
        key="coupling",
        wide=True,
        title="Coupling of tokens through W': C, from token (column) to token (row)",
        says="Each cell is the size of the block of W' that leads from one token to another, |B_ij|_F. Left and right "
        "change the block when the choice of block has the focus; on the map the arrow keys move from cell to cell.",
        picture=tag("div", tag("noscript", "The map is drawn by the page's script, which is off."), class_="map"),
        tables=[],
        terms=["maps[].blocks[].coupling"],
        notes=[note for found in report.maps if (note := _cut(found))],
    )


def _cut(found: CouplingMap) -> str:
    shown = len(found.tokens)
    if shown == found.total_tokens:
        return ""
    return f"Prompt {found.prompt}: the first {shown} of {plural(found.total_tokens, 'token')} are shown."

"""The HTML page of reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duat_cli.results.base import Report


def page_of(reports: Sequence[tuple[str | None, Report]]) -> str:
    """The HTML of some reports, each with the name of the file that it comes from, if it does; those of the stacks of
    one model stand side by side."""
    from duat_cli.explain.find import everything
    from duat_cli.report.html.document import document

    known = {}
    for entry in everything():
        if entry.kind == "field":
            for place in entry.where:
                command, _, path = place.partition(": ")
                known[command, path] = entry
    return document([(source, one) for source, report in reports for one in getattr(report, "stacks", [report])], known)

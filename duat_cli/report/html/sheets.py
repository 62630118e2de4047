"""The functions that make the sheet of each command's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duat_cli.report.html.attribute.page import attribute_sheet
from duat_cli.report.html.check import check_sheet
from duat_cli.report.html.compare.page import compare_sheet
from duat_cli.report.html.drawing.figure import Sheet
from duat_cli.report.html.inspect.page import inspect_sheet
from duat_cli.report.html.lora import lora_sheet
from duat_cli.report.html.matrix import matrix_sheet, network_sheet
from duat_cli.report.html.plan import plan_sheet
from duat_cli.report.html.prune.page import prune_sheet
from duat_cli.results.base import Report

_Maker = Callable[[Any, Sequence[Any]], Sheet]
"""Makes the sheet of a report. The second argument is all reports of its command on the page, including this one; they
share their axes."""
SHEETS: dict[str, _Maker] = {
    "attribute": attribute_sheet,
    "check": check_sheet,
    "compare": compare_sheet,
    "inspect": inspect_sheet,
    "lora-diff": lora_sheet,
    "matrix": matrix_sheet,
    "matrix --network": network_sheet,
    "plan": plan_sheet,
    "prune-bound": prune_sheet,
}


def sheets(reports: Sequence[Report]) -> list[Sheet]:
    """The sheet of each report."""
    return [SHEETS[report.command](report, [r for r in reports if r.command == report.command]) for report in reports]

"""Which function makes the sheet of which command's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duat_cli.report.html.attribute.page import attribute_sheet
from duat_cli.report.html.check.page import check_sheet
from duat_cli.report.html.compare.page import compare_sheet
from duat_cli.report.html.drawing.figure import Sheet
from duat_cli.report.html.inspect.page import inspect_sheet
from duat_cli.report.html.lora.page import lora_sheet
from duat_cli.report.html.matrix.network import network_sheet
from duat_cli.report.html.matrix.page import matrix_sheet
from duat_cli.report.html.plan.page import plan_sheet
from duat_cli.report.html.prune.page import prune_sheet
from duat_cli.results.base import Result

_Maker = Callable[[Any, Sequence[Any]], Sheet]
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


def command_of(report: Result) -> str:
    """The command that wrote a report."""
    return str(getattr(report, "command", ""))


def sheets(reports: Sequence[Result]) -> list[Sheet]:
    """One of each report; reports of one command share their axes."""
    by_command: dict[str, list[Result]] = {}
    for report in reports:
        by_command.setdefault(command_of(report), []).append(report)
    return [SHEETS[command](report, by_command[command]) for report in reports if (command := command_of(report))]

"""Reports as text: the functions that make the tables of each command's report."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from duat_cli.report.tables.page import Page
    from duat_cli.results.base import Report

_TABLES = {  # modules are imported when needed, as all of them together take a fifth of a second
    "attribute": "tables.attribute.report.render_attribute",
    "check": "check.table.render_check",
    "compare": "tables.compare.render_compare",
    "explain": "explain.render_explain",
    "inspect": "tables.inspect.render_inspect",
    "lora-diff": "tables.lora.render_lora",
    "matrix": "tables.matrix.render_matrix",
    "matrix --network": "tables.matrix.render_network",
    "plan": "tables.plan.render_plan",
    "prune-bound": "tables.prune.report.render_prune",
    "support": "tables.support.render_support",
    "verify": "tables.verify.render_verify",
}


def to_text(report: Report, page: Page) -> str:
    """The table of a report; for several stacks of a model, one table below the other."""
    return "\n\n".join(_table(one, page) for one in getattr(report, "stacks", [report]))


def _table(report: Report, page: Page) -> str:
    module, _, function = _TABLES[report.command].rpartition(".")
    render: Callable[[Report, Page], str] = getattr(importlib.import_module(f"duat_cli.report.{module}"), function)
    return render(report, page)

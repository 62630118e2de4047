"""`duat support` as text for a terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from duat_cli.report.tables import numbers
from duat_cli.report.tables.page import BLANK, Page, heading, item, line
from duat_cli.results.support import SupportEntry, SupportReport

_STYLES = {"exact": "green", "partly": "yellow", "refused": "red"}
_PATHS = {"attention interface": "interface", "softmax interception": "softmax", "frozen kernel": "kernel"}


def render_support(report: SupportReport, page: Page) -> str:
    """The report as text: a row per model type, and the counts."""
    entries = report.entries
    rows: list[RenderableType] = [_entry(entry) for entry in entries] if page.narrow else [_table(entries, page)]
    return page.render(*rows, BLANK, heading(_total(report)))


def _table(entries: list[SupportEntry], page: Page) -> Table:
    table = page.table()
    table.add_column("model type", overflow="fold", max_width=page.width // 3)
    several = len({entry.modality for entry in entries}) > 1
    if several:
        table.add_column("reads", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("path", no_wrap=True)
    table.add_column("rel. error", no_wrap=True, justify="right")
    table.add_column("what is missing, and why", overflow="fold", ratio=1)
    for entry in entries:
        status = Text(entry.status, style=_STYLES[entry.status])
        error = numbers.error(entry.relative_error)
        path = _PATHS[entry.path] if entry.path else numbers.ABSENT
        read = [entry.modality] if several else []
        table.add_row(line(entry.model_type), *read, status, path, error, line(_remark(entry)))
    return table


def _entry(entry: SupportEntry) -> RenderableType:
    error = "" if entry.relative_error is None else f"relative error {numbers.error(entry.relative_error)}"
    facts = [entry.status, entry.path or "", error, _remark(entry)]
    return item(f"{entry.model_type}: {', '.join(fact for fact in facts if fact)}")


def _remark(entry: SupportEntry) -> str:
    stacks = ", ".join(f"{one.stack} {one.status}" for one in entry.stacks)
    named = [f"--stack {stacks}"] if stacks else []
    return "; ".join([*entry.parts, *([entry.reason] if entry.reason else []), *named])


def _total(report: SupportReport) -> str:
    counts = Counter[str](entry.status for entry in report.entries)
    shares = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
    kinds = Counter[str](entry.modality for entry in report.entries)
    read = ", ".join(f"{name} {count}" for name, count in kinds.items()) if len(kinds) > 1 else ""
    total = f"{shares or 'none'} of {len(report.entries)}{f' ({read})' if read else ''}"
    return f"{total}; transformers {report.transformers}"

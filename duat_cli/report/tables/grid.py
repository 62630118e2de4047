"""Tables of numbers that lose nothing unsaid: what does not fit beside goes below, with its labels, or is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from duat_cli.grouping import by_key
from duat_cli.report.tables.numbers import Form
from duat_cli.report.tables.page import BLANK, Page, heading, line, note
from duat_cli.results.base import Result, WithReasons
from duat_cli.results.prune.terms import Estimated
from duat_cli.text import clean

GAP, CLOSE = 2, 1  # columns of space between two columns, and the least
NO_REASON = "no reason was given"
_BREAK = "\N{SOFT HYPHEN}"


@dataclass(frozen=True)
class Column:
    """One number of each row: where it stands there, and its header. Of several lines the last is the unit or scale."""

    title: tuple[str, ...]
    """A word that is broken between two lines has a soft hyphen at the end of the first."""
    path: str
    form: Form
    long: tuple[str, str] | None = None
    """Its name and unit on a page, where they are longer than here."""

    def value(self, row: Result) -> float | None:
        return value_at(row, self.path)

    def reason(self, row: Result) -> str | None:
        return reason_at(row, self.path)

    def cell(self, row: Result) -> str:
        return self.form(self.value(row))

    @property
    def header(self) -> tuple[str, ...]:
        """The lines as they are printed."""
        return tuple(line.replace(_BREAK, "-") for line in self.title)

    @property
    def name(self) -> str:
        """The header in one line, without its unit."""
        lines = self.title[:-1] or self.title
        if lines[-1].endswith(_BREAK):  # its last line is the rest of a word, and no unit
            lines = self.title
        return " ".join(filter(None, lines)).replace(f"{_BREAK} ", "").replace("- ", "-").rstrip(",")


def on_page(columns: Iterable[Column], *paths: str) -> list[Column]:
    """The columns with the headers that a page has room for. paths: which ones, in this order; without any all."""
    shown = {c.path: c if c.long is None else replace(c, title=c.long) for c in columns}
    return [shown[path] for path in paths or shown]


@dataclass(frozen=True)
class Labels:
    """The first column: what each row is."""

    title: tuple[str, ...]
    of: Callable[[Any], Any]
    right: bool = True

    def text(self, row: Result) -> str:
        """Foreign names escaped."""
        return clean(str(self.of(row)))


Named = Sequence[tuple[str, Result]]
"""Rows with their names."""
BLOCK = Labels(("block",), lambda row: row.index)
PROMPT = Labels(("prompt", "from 0"), lambda row: row.prompt)
KIND = Labels(("what",), lambda row: row.granularity, right=False)


def value_at(row: Result, path: str) -> float | None:
    """The value at 'group.field' of a row, of an estimate without its interval; None where it, or a group on the way,
    is null."""
    found: object = row
    for name in path.split("."):
        if found is None:
            return None
        found = getattr(found, name)
    return found.value if isinstance(found, Estimated) else found  # type: ignore[return-value]


def reason_at(row: Result, path: str) -> str | None:
    """Why there is no value at a path: the reason beside the first null on the way."""
    found: object = row
    for name in path.split("."):
        owner, found = found, getattr(found, name)
        if found is None:
            reasons = owner.reasons if isinstance(owner, WithReasons) else {}
            return reasons.get(name, NO_REASON)
    return None


def grids(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> list[Table]:
    """The rows as one table, closer together if it fits only so, or as several where it would still be wider than the
    page and the page is not to be wide."""
    if page.wide:
        return [_grid(rows, labels, columns, page)]
    if _width(rows, labels, columns) > page.width >= _width(rows, labels, columns, CLOSE):
        return [_grid(rows, labels, columns, page, CLOSE)]
    room = page.width - min(_label_width(rows, labels), page.width // 2)
    widths = [_column_width(rows, column) + GAP for column in columns]
    return [_grid(rows, labels, columns[pack], page) for pack in packs(widths, room)]


def packs(widths: Sequence[int], room: int) -> Iterator[slice]:
    """Ranges of columns that fit into the room, at least one column each."""
    start = 0
    for stop in range(1, len(widths)):
        if sum(widths[start : stop + 1]) > room:
            yield slice(start, stop)
            start = stop
    yield slice(start, len(widths))


def spaced(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> list[RenderableType]:
    """The same, a blank line in front of each."""
    if not rows:
        return [BLANK, line("no rows")]
    return [part for table in grids(rows, labels, columns, page) for part in (BLANK, table)]


def titled(
    title: str, rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page, *legend: str
) -> list[RenderableType]:
    """The same under a title, and below it what its headers mean, a paragraph each."""
    below = [BLANK, *(note(text) for text in legend)] if legend else []
    return [BLANK, heading(title), *spaced(rows, labels, columns, page), *below]


def titled_named(
    title: str, rows: Named, columns: Sequence[Column], page: Page, *legend: str, head: str = "what"
) -> list[RenderableType]:
    """The same of rows that are given with their names, nothing without any. head: of the names."""
    names = {id(row): name for name, row in rows}
    labels = Labels((head,), lambda row: names[id(row)], right=False)
    return titled(title, [row for _, row in rows], labels, columns, page, *legend) if rows else []


def filled(rows: Sequence[Result], columns: Sequence[Column]) -> list[Column]:
    """The columns that have a value in any row."""
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def fits(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> bool:
    """Whether one table holds all columns."""
    return page.wide or _width(rows, labels, columns) <= page.width


def unshown(rows: Sequence[Result], columns: Sequence[Column], shown: Sequence[Column]) -> list[RenderableType]:
    """A line below a table that names the columns with values for which the page had no room; nothing without any."""
    paths = {column.path for column in shown}
    names = [column.name for column in filled(rows, columns) if column.path not in paths]
    if not names:
        return []
    return [note(f"no room for: {', '.join(names)}; --wide shows all columns, --json every value.")]


def _width(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], gap: int = GAP) -> int:
    return _label_width(rows, labels) + sum(_column_width(rows, column) + gap for column in columns)


def _column_width(rows: Sequence[Result], column: Column) -> int:
    return max(len(text) for text in (*column.header, *(column.cell(row) for row in rows)))


def _label_width(rows: Sequence[Result], labels: Labels) -> int:
    return max(cell_len(text) for text in (*labels.title, *(labels.text(row) for row in rows)))


def missing(
    rows: Sequence[Result], columns: Sequence[Column], numbers: Sequence[int]
) -> list[tuple[str, str, list[int]]]:
    """Absent cells as (columns, reason, row numbers), together where reason and rows are the same."""
    absent = (
        ((column.name, column.reason(row) or NO_REASON), number)
        for column in columns
        for row, number in zip(rows, numbers, strict=True)
        if column.value(row) is None
    )
    return together(absent, ", ")


def together(absent: Iterable[tuple[tuple[str, str], int]], between: str) -> list[tuple[str, str, list[int]]]:
    """(names, reason, row numbers), of ((name, reason), row number): names whose reason and rows are the same."""
    names = by_key(((reason, tuple(at)), name) for (name, reason), at in by_key(absent).items())
    return [(between.join(those), reason, list(at)) for (reason, at), those in names.items()]


def _grid(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page, gap: int = GAP) -> Table:
    table = page.table(gap - 1)
    if page.wide:
        table.width = _width(rows, labels, columns)  # rich would else fold it to the page
    side: Literal["left", "right"] = "right" if labels.right else "left"
    table.add_column("\n".join(labels.title), justify=side, vertical="bottom", overflow="fold")
    for column in columns:
        title = "\n".join(column.header)
        table.add_column(title, justify="right", vertical="bottom", no_wrap=True, overflow="fold")
    for row in rows:
        cells = (Text(column.cell(row)) for column in columns)
        table.add_row(Text(labels.text(row), overflow="fold"), *cells)
    return table

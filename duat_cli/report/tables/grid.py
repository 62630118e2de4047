"""Tables of numbers. Columns that do not fit beside the others go into a table below, or are named in a note."""

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

GAP, CLOSE = 2, 1  # cells between two columns: normally, and at least
NO_REASON = "no reason was given"
_BREAK = "\N{SOFT HYPHEN}"


@dataclass(frozen=True)
class Column:
    """One number of each row, with its path there and its header."""

    title: tuple[str, ...]
    """Lines of the header; if there are several, the last is the unit or scale. A word that is broken between two lines
    has a soft hyphen at the end of the first."""
    path: str
    form: Form
    long: tuple[str, str] | None = None
    """Name and unit on an HTML page, where they may be longer."""

    def value(self, row: Result) -> float | None:
        return value_at(row, self.path)

    def reason(self, row: Result) -> str | None:
        return reason_at(row, self.path)

    def cell(self, row: Result) -> str:
        return self.form(self.value(row))

    @property
    def header(self) -> tuple[str, ...]:
        """The lines of the header as they are printed."""
        return tuple(line.replace(_BREAK, "-") for line in self.title)

    @property
    def name(self) -> str:
        """The header in one line, without its unit."""
        lines = self.title[:-1] or self.title
        if lines[-1].endswith(_BREAK):  # the last line is the rest of a word instead of a unit
            lines = self.title
        return " ".join(filter(None, lines)).replace(f"{_BREAK} ", "").replace("- ", "-").rstrip(",")


def on_page(columns: Iterable[Column], *paths: str) -> list[Column]:
    """The columns with the longer headers of an HTML page. paths: which ones, in this order; all if none is given."""
    shown = {c.path: c if c.long is None else replace(c, title=c.long) for c in columns}
    return [shown[path] for path in paths or shown]


def of_cross(columns: Iterable[Column]) -> list[Column]:
    """The same columns of W'_c, whose field `cross` stands beside `operator`; of each path the first part differs."""
    return [replace(column, path=column.path.replace("operator.", "cross.")) for column in columns]


@dataclass(frozen=True)
class Labels:
    """The first column, which names each row."""

    title: tuple[str, ...]
    of: Callable[[Any], Any]
    right: bool = True

    def text(self, row: Result) -> str:
        """The name of a row, with foreign characters escaped."""
        return clean(str(self.of(row)))


Named = Sequence[tuple[str, Result]]
"""Rows with their names."""
BLOCK = Labels(("block",), lambda row: row.index)
PROMPT = Labels(("prompt", "from 0"), lambda row: row.prompt)
KIND = Labels(("what",), lambda row: row.granularity, right=False)


def value_at(row: Result, path: str) -> float | None:
    """The value at 'group.field' of a row, without the interval if it is an estimate; None where it, or a group on the
    way, is null."""
    found: object = row
    for name in path.split("."):
        if found is None:
            return None
        found = getattr(found, name)
    return found.value if isinstance(found, Estimated) else found  # type: ignore[return-value]


def reason_at(row: Result, path: str) -> str | None:
    """The reason beside the first null on a path; None where there is a value."""
    found: object = row
    for name in path.split("."):
        owner, found = found, getattr(found, name)
        if found is None:
            reasons = owner.reasons if isinstance(owner, WithReasons) else {}
            return reasons.get(name, NO_REASON)
    return None


def grids(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> list[Table]:
    """The rows as one table. If it is too wide for the page, its columns move closer together; if that is not enough,
    they are split into several tables, unless the page is `wide`."""
    if page.wide:
        return [_grid(rows, labels, columns, page)]
    if _width(rows, labels, columns) > page.width >= _width(rows, labels, columns, CLOSE):
        return [_grid(rows, labels, columns, page, CLOSE)]
    room = page.width - min(_label_width(rows, labels), page.width // 2)
    widths = [_column_width(rows, column) + GAP for column in columns]
    return [_grid(rows, labels, columns[pack], page) for pack in packs(widths, room)]


def packs(widths: Sequence[int], room: int) -> Iterator[slice]:
    """Ranges of columns that fit into the room, each with at least one column."""
    start = 0
    for stop in range(1, len(widths)):
        if sum(widths[start : stop + 1]) > room:
            yield slice(start, stop)
            start = stop
    yield slice(start, len(widths))


def spaced(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> list[RenderableType]:
    """The tables of `grids`, each after a blank line."""
    if not rows:
        return [BLANK, line("no rows")]
    return [part for table in grids(rows, labels, columns, page) for part in (BLANK, table)]


def titled(
    title: str, rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page, *legend: str
) -> list[RenderableType]:
    """The tables of `spaced` under a title, followed by the legend, a paragraph per text."""
    below = [BLANK, *(note(text) for text in legend)] if legend else []
    return [BLANK, heading(title), *spaced(rows, labels, columns, page), *below]


def titled_named(
    title: str, rows: Named, columns: Sequence[Column], page: Page, *legend: str, head: str = "what"
) -> list[RenderableType]:
    """The tables of `titled` for rows given with their names; nothing without rows. head: header of the names."""
    names = {id(row): name for name, row in rows}
    labels = Labels((head,), lambda row: names[id(row)], right=False)
    return titled(title, [row for _, row in rows], labels, columns, page, *legend) if rows else []


def filled(rows: Sequence[Result], columns: Sequence[Column]) -> list[Column]:
    """The columns that have a value in any row."""
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def fits(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page) -> bool:
    """Whether one table with all columns fits the page."""
    return page.wide or _width(rows, labels, columns) <= page.width


def unshown(rows: Sequence[Result], columns: Sequence[Column], shown: Sequence[Column]) -> list[RenderableType]:
    """A note below a table on columns with values that had no room; nothing if there are none."""
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
    """Absent cells as (columns, reason, row numbers), merged where reason and rows are the same."""
    absent = (
        ((column.name, column.reason(row) or NO_REASON), number)
        for column in columns
        for row, number in zip(rows, numbers, strict=True)
        if column.value(row) is None
    )
    return together(absent, ", ")


def together(absent: Iterable[tuple[tuple[str, str], int]], between: str) -> list[tuple[str, str, list[int]]]:
    """(names, reason, row numbers) from ((name, reason), row number), merging names with the same reason and rows."""
    names = by_key(((reason, tuple(at)), name) for (name, reason), at in by_key(absent).items())
    return [(between.join(those), reason, list(at)) for (reason, at), those in names.items()]


def _grid(rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page, gap: int = GAP) -> Table:
    table = page.table(gap - 1)
    if page.wide:
        table.width = _width(rows, labels, columns)  # otherwise rich would fold it to the page
    side: Literal["left", "right"] = "right" if labels.right else "left"
    table.add_column("\n".join(labels.title), justify=side, vertical="bottom", overflow="fold")
    for column in columns:
        title = "\n".join(column.header)
        table.add_column(title, justify="right", vertical="bottom", no_wrap=True, overflow="fold")
    for row in rows:
        cells = (Text(column.cell(row)) for column in columns)
        table.add_row(Text(labels.text(row), overflow="fold"), *cells)
    return table

"""Tables behind pictures: headers with units and definitions, and numbers printed as on the terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from duat_cli.report.html.drawing.elements import Content
from duat_cli.report.tables.grid import Column, filled, missing
from duat_cli.results.base import Result
from duat_cli.text import indices

_Item = TypeVar("_Item")
_Row = TypeVar("_Row", bound=Result)
MOST_ROWS = 400  # most rows of a table; the rest is in the JSON
_NUMBER = re.compile(r"\.\d+")  # number of an entry in a path


@dataclass(frozen=True)
class Head:
    """A column's header."""

    name: str
    unit: str = ""
    path: str = ""
    """Path of its field in the row's object; '' if the column is no field."""
    number: bool = True
    """Whether it has numbers, which are aligned to the right."""
    long: bool = False
    """Whether it has sentences, which take several lines."""

    @property
    def style(self) -> str:
        return "" if self.number else "words long" if self.long else "words"


@dataclass(frozen=True)
class Table:
    """A table. place: path in the report of the list that the rows come from, such as 'blocks[].'; with a head's path
    it gives the definition of a column. at: each row's own place, such as 'blocks.3'."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Content]]
    place: str = ""
    at: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def shown(self) -> list[tuple[str, Sequence[Content]]]:
        """(place without the root, cells) of the rows that the page shows."""
        root, rows = self.root, self.rows[:MOST_ROWS]
        places = [place.removeprefix(root) for place in self.at[:MOST_ROWS]] or [""] * len(rows)
        return list(zip(places, rows, strict=True))

    @property
    def root(self) -> str:
        """The common prefix of the places of all rows, up to a dot."""
        first, last = min(self.at, default=""), max(self.at, default="")
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        return first[: first.rfind(".", 0, same) + 1]

    @property
    def left_out(self) -> int:
        """How many rows the page leaves out."""
        return max(0, len(self.rows) - MOST_ROWS)


def table_by(
    path: str,
    items: Sequence[_Item],
    *columns: Column | tuple[Head, Callable[[_Item], Content]],
    numbers: Sequence[int] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """A table of objects in the report, with a row per object. columns: a number of each object, or a header with a
    function that gives the cell of an object.

    path: of the list that holds the objects, such as 'attribution.3.parts.tokens[]', or of a single object, such as
    'end_to_end'. numbers: which entries of the list the objects are; None: all, in order.
    """
    pairs: list[tuple[Head, Callable[[Any], Content]]] = [
        (Head(c.name, c.title[-1], c.path), c.cell) if isinstance(c, Column) else c for c in columns
    ]
    rows = [[cell(item) for _, cell in pairs] for item in items]
    within = path.removesuffix("[]")
    entries = [f"{within}.{i}" for i in (range(len(rows)) if numbers is None else numbers)]
    at = [path] if within == path else entries
    return Table([head for head, _ in pairs], rows, f"{field_of(path)}.", at, notes)


def field_of(path: str) -> str:
    """The field at a path, without the numbers of entries: 'ways[].bytes' for 'ways.0.bytes'."""
    return _NUMBER.sub("[]", path)


def table_of(
    rows: Sequence[_Row],
    head: Head,
    name: Callable[[_Row], str],
    columns: Sequence[Column],
    path: str,
    word: str = "row",
    numbers: Sequence[int] | None = None,
) -> Table:
    """A table with a row per result: its name, then its columns. Columns without any value are left out; notes say why
    single cells are empty.

    head, name: header and text of the first column. path, numbers: as for `table_by`. word: the word for a row.
    """
    known = filled(rows, columns)
    first = 1 if word == "row" else 0  # blocks and prompts have numbers of their own
    absent = missing(rows, known, list(range(first, first + len(rows))))
    notes = [f"No value: {names}: {reason} ({indices(word, at)})." for names, reason, at in absent]
    return table_by(path, rows, (head, name), *known, numbers=numbers, notes=notes)

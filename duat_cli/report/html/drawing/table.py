"""Tables behind pictures: headers with units and definitions, numbers as the terminal prints them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from duat_cli.report.html.drawing.elements import Content
from duat_cli.report.tables.grid import Column, filled, missing
from duat_cli.results.base import Result
from duat_cli.text import indices

_Row = TypeVar("_Row", bound=Result)
MOST_ROWS = 400  # of one table; the rest is in the JSON


@dataclass(frozen=True)
class Head:
    """A column's header."""

    name: str
    unit: str = ""
    path: str = ""
    """Of its field inside the row's object; '' where the column is no field."""
    number: bool = True
    """Numbers stand at the right."""
    long: bool = False
    """Whether its words are sentences, which take several lines."""

    @property
    def style(self) -> str:
        return "" if self.number else "words long" if self.long else "words"


@dataclass(frozen=True)
class Table:
    """place: path in the report of the list that the rows come from, such as 'blocks[].'; with it and a head's path a
    column's definition is found. at: each row's own place, such as 'blocks.3'."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Content]]
    place: str = ""
    at: Sequence[str] = ()
    notes: Sequence[str] = field(default=())

    @property
    def shown(self) -> list[tuple[str, Sequence[Content]]]:
        """(place behind the root, cells) of the rows that the page has."""
        root, rows = self.root, self.rows[:MOST_ROWS]
        places = [place.removeprefix(root) for place in self.at[:MOST_ROWS]] or [""] * len(rows)
        return list(zip(places, rows, strict=True))

    @property
    def root(self) -> str:
        """What the places of all rows begin with, up to a dot."""
        first, last = min(self.at, default=""), max(self.at, default="")
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        return first[: first.rfind(".", 0, same) + 1]

    @property
    def left_out(self) -> int:
        """How many rows the page has no room for."""
        return max(0, len(self.rows) - MOST_ROWS)


def table_of(
    rows: Sequence[_Row],
    label: str,
    name: Callable[[_Row], str],
    columns: Sequence[Column],
    place: str,
    word: str = "row",
    *,
    numbered: bool = True,
    at: Sequence[str] = (),
) -> Table:
    """A row a result: its name, then its columns. Columns without any value are left out; why single cells are empty
    is said below.

    label, name: header and text of the first column. place: the path of the rows' list, such as 'blocks[].', or of the
    one row, such as 'end_to_end.'. word: what a row is. at: each row's own place, where that does not follow from the
    list's.
    """
    known = filled(rows, columns)
    where = place.removesuffix(".").replace("[]", "")
    absent = missing(rows, known, list(range(len(rows))))
    return Table(
        heads=[Head(label, number=numbered), *(Head(c.name, c.title[-1], c.path) for c in known)],
        rows=[[name(row), *(c.cell(row) for c in known)] for row in rows],
        place=place,
        at=at or [f"{where}.{i}" if place.endswith("[].") else where for i in range(len(rows))],
        notes=[f"No value: {names}: {reason} ({indices(word, at)})." for names, reason, at in absent],
    )

"""The page that a report is printed on (width, colour, boxes), and rich's output on it as a string."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from duat_cli.text import clean

BLANK = Text("")
TOKEN = 16  # most cells of a token in a table
TARGET = 40  # most cells of a token in a sentence


@dataclass(frozen=True)
class Page:
    """Properties of the reader's screen or file."""

    width: int = 80
    color: bool = False
    boxes: bool = True
    wide: bool = False
    """Whether tables of numbers show all their columns side by side, even beyond `width`."""
    every: bool = False
    """Whether tables that sum up similar rows show each of them, and no list is cut: --all."""

    @property
    def narrow(self) -> bool:
        """Whether the page is too narrow for a column of sentences beside others."""
        return self.width < 72

    def table(self, space: int = 1) -> Table:
        """A table with a line under its header, and none between columns, to leave room for numbers. space: cells
        behind each column, in addition to the cell of the line that is not drawn."""
        rule = _RULE if self.boxes else _ASCII_RULE
        return Table(box=rule, show_edge=False, pad_edge=False, padding=(0, space, 0, 0), header_style="bold")

    def render(self, *parts: RenderableType) -> str:
        """The parts below each other as text, without spaces at the ends of lines."""
        console = Console(
            file=io.StringIO(),
            width=self.width,
            force_terminal=self.color,
            color_system="standard" if self.color else None,
            no_color=not self.color,
            legacy_windows=False,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=False,
        )
        with console.capture() as capture:
            for part in parts:
                console.print(part, crop=not self.wide)
        return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def line(text: str, style: str = "") -> Text:
    """A paragraph; foreign characters are escaped, and markup is not interpreted."""
    return Text(clean(text), style=style, overflow="fold")


def heading(text: str) -> Text:
    """A title for what follows."""
    return line(text, "bold")


def note(text: str) -> Text:
    """A remark on a table."""
    return line(text, "dim")


def cut(text: str, cells: int = TOKEN) -> str:
    """The text, cut to at most so many cells."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 2) + ".."


def item(text: str, style: str = "") -> RenderableType:
    """A paragraph after a dash, with its further lines indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text("-"), line(text, style))
    return indented(grid)


def indented(part: RenderableType) -> RenderableType:
    """The part, indented."""
    return Padding(part, (0, 0, 0, 2))


_RULE = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII_RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)

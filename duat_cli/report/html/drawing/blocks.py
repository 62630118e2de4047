"""Functions for pictures and tables over blocks, which are a report's objects with an `index`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.cells import cell_map
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot, Sample, curve, stack
from duat_cli.report.html.drawing.scales import Band, Linear, Scale
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at

Parts = Sequence[tuple[str, str, str]]
"""Numbers of each block, as (path in the block, series, name)."""
Heads = Sequence[tuple[int, Any, Sequence[Any]]]
"""Blocks that have heads, as (place among all blocks, block, its heads)."""


def across(blocks: Sequence[Any], most: int = 20) -> Axis:
    """The axis of a plot over blocks. most: how many ticks fit."""
    return Axis("block", Band([str(block.index) for block in blocks], most))


def half_wide(blocks: Sequence[Any], title: str, scale: Scale, height: float = 250) -> Plot:
    """A plot over blocks that leaves room for another beside it. title, scale: of its upright axis."""
    return Plot(across(blocks, most=12), Axis(title, scale), width=500, height=height)


def lines(
    plot: Plot, blocks: Sequence[Any], parts: Parts, form: Callable[[float], str], *, size: float = 4.0
) -> list[Mark]:
    """A line for each part over the blocks that have a number for it, hollow if it is a null. form, size: as for
    `curve`."""
    places = [f"block {block.index}" for block in blocks]
    drawn = []
    for path, series, name in parts:
        values = [value_at(block, path) for block in blocks]
        drawn += curve(plot, values, series, places, name, form, hollow=_is_null(path), size=size)
    return drawn


def meanings(kind: str, parts: Parts) -> list[Sample]:
    """The legend of parts. kind: of their marks, as for `marks.sample`."""
    return [(f"hollow {kind}" if _is_null(path) else kind, series, name) for path, series, name in parts]


def parts_of_cross(parts: Parts) -> Parts:
    """The same parts of W'_c, as `of_cross` gives columns."""
    return [(path.replace("operator.", "cross."), series, name) for path, series, name in parts]


def _is_null(path: str) -> bool:
    return "null" in path.split(".")


def stacked(
    blocks: Sequence[Any],
    beside: Sequence[Any],
    parts: Parts,
    title: str,
    about: str,
    points: Parts = (),
    least: float = 0.0,
) -> Markup:
    """Stacked bars of every block's shares, in percent.

    beside: the blocks of all pictures that share the upright axis. title: of that axis, which goes up to `least` at
    least. about: as for `Plot.svg`. points: drawn over the bars, hollow if they are nulls.
    """
    heights = [value_at(block, path) for block in beside for path, _, _ in points]
    heights += [end for block in beside for end in _ends(block, parts)]
    plot = Plot(across(blocks), Axis(title, Linear.over([*heights, least], percent=True)))
    drawn = []
    for place, block in enumerate(blocks):
        shares = [(value_at(block, path), series, name) for path, series, name in parts]
        said = f"block {block.index}, "
        drawn += stack(plot, place, [(v, s, f"{said}{name}: {numbers.percent(v)} %") for v, s, name in shares])
        for path, series, name in points:
            value = value_at(block, path)
            if value is not None:
                text = f"{said}{name}: {numbers.percent(value)} %"
                drawn.append(marks.dot(plot.x(place), plot.y(value), series, text, size=5, hollow=_is_null(path)))
    return plot.svg(drawn, about)


def _ends(block: Any, parts: Parts) -> tuple[float, float]:
    """How far a block's bar goes below and above zero."""
    values = [value_at(block, path) or 0.0 for path, _, _ in parts]
    return sum(min(v, 0.0) for v in values), sum(max(v, 0.0) for v in values)


def map_of_heads(found: Heads, column: Column, largest: float, *, word: str = "head", signed: bool = False) -> Markup:
    """A map of a share of every head, with heads across and blocks upwards. largest: value of the deepest colour. word:
    the word for a head, or for what is drawn instead. signed: as for `cell_map`."""
    count = max(len(heads) for _, _, heads in found)
    plot = Plot(
        Axis(word, Band([str(head) for head in range(count)], most=16)),
        across([block for _, block, _ in found], most=32),
        width=500,
        height=80 + min(480, max(16, 240 // len(found)) * len(found)),
    )
    rows = [[value_at(head, column.path) for head in heads] for _, _, heads in found]

    def said(row: int, head: int) -> str:
        return f"block {found[row][1].index}, {word} {head}, {column.name} in %"

    about = f"Map of {column.name}: {word}s across, blocks upwards."
    return cell_map(plot, rows, said, about, numbers.percent, largest=largest, signed=signed, percent=True)


def table_of_heads(found: Heads, columns: Sequence[Column], path: str, *, word: str = "head") -> Table:
    """A table with a row per head. path: of the heads in the report, such as 'blocks[].heads.each[]'. word: as for
    `map_of_heads`."""
    every = [(place, block, number, head) for place, block, heads in found for number, head in enumerate(heads)]
    return Table(
        heads=[Head(word, f"block.{word}"), *(Head(c.name, c.title[-1], c.path) for c in columns)],
        rows=[[f"{block.index}.{number}", *(c.cell(head) for c in columns)] for _, block, number, head in every],
        place=f"{path}.",
        at=[path.replace("[]", ".{}").format(place, number) for place, _, number, _ in every],
    )


def table_of_blocks(
    blocks: Sequence[Any], columns: Sequence[Column], path: str = "blocks[]", label: str = "block"
) -> Table:
    """A table with a row per block. path: as for `table_of`."""
    return table_of(blocks, Head(label), lambda block: str(block.index), columns, path, "block")

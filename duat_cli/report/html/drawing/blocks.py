"""What pictures and tables over blocks share. Blocks are a report's objects that have an `index`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Scale
from duat_cli.report.html.drawing.series import curve, stack
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at

Parts = Sequence[tuple[str, str, str]]
"""Of shares that a bar is made of: where each stands in a block, its series, and what it is called."""


def across(blocks: Sequence[Any], most: int = 20) -> Axis:
    """The axis of a plot over blocks. most: how many ticks there is room for."""
    return Axis("block", Band([str(block.index) for block in blocks], most))


def half_wide(blocks: Sequence[Any], title: str, scale: Scale, height: float = 250) -> Plot:
    """A plot over blocks beside which another has room. title, scale: of its upright axis."""
    return Plot(across(blocks, most=12), Axis(title, scale), width=500, height=height)


def line_over(
    plot: Plot,
    blocks: Sequence[Any],
    path: str,
    series: str,
    name: str,
    form: Callable[[float], str],
    *,
    hollow: bool = False,
    size: float = 4.0,
) -> list[Mark]:
    """A number of every block that has it, at this path, as of `curve`."""
    values, places = [value_at(block, path) for block in blocks], [f"block {block.index}" for block in blocks]
    return curve(plot, values, series, places, name, form, hollow=hollow, size=size)


def stacked(plot: Plot, place: int, block: Any, parts: Parts) -> list[Mark]:
    """A block's shares on each other, in percent."""
    shares = [(value_at(block, path), series, name) for path, series, name in parts]
    said = f"block {block.index}, "
    return stack(plot, place, [(v, s, f"{said}{name}: {numbers.percent(v)} %") for v, s, name in shares])


def ends(block: Any, parts: Parts) -> tuple[float, float]:
    """How far a block's bar goes below and above zero."""
    values = [value_at(block, path) or 0.0 for path, _, _ in parts]
    return sum(min(v, 0.0) for v in values), sum(max(v, 0.0) for v in values)


def table_of_blocks(
    blocks: Sequence[Any], columns: Sequence[Column], path: str = "blocks[]", label: str = "block"
) -> Table:
    """A row a block. path: as of `table_of`."""
    return table_of(blocks, Head(label), lambda block: str(block.index), columns, path, "block")

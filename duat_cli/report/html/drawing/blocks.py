"""What pictures and tables over blocks share. Blocks are a report's objects that have an `index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duat_cli.report.html.drawing.plot import Axis
from duat_cli.report.html.drawing.scales import Band
from duat_cli.report.html.drawing.table import Table, table_of
from duat_cli.report.tables.grid import Column


def across(blocks: Sequence[Any], most: int = 20) -> Axis:
    """The axis of a plot over blocks. most: how many ticks there is room for."""
    return Axis("block", Band([str(block.index) for block in blocks], most))


def block_names(blocks: Sequence[Any]) -> list[str]:
    """What each is called where a mark says its value."""
    return [f"block {block.index}" for block in blocks]


def table_of_blocks(
    blocks: Sequence[Any],
    columns: Sequence[Column],
    place: str = "blocks[].",
    label: str = "block",
    at: Sequence[str] = (),
) -> Table:
    """A row a block. place, at: as of `table_of`."""
    return table_of(blocks, label, lambda block: str(block.index), columns, place, "block", at=at)

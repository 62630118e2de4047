"""What each attention head reads, with --heads: maps of the shares by block and head, of one scale of colours."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.blocks import map_of_heads, table_of_blocks, table_of_heads
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.report.tables.heads import COLUMNS
from duat_cli.results.inspect import Block, InspectReport

_SAYS = {
    "first_token_share": "The share of a row that the first token has. Large: an attention sink.",
    "current_token_share": "The share of a row that its own token has.",
    "previous_token_share": "The share of a row that the token in front of it has.",
    "duplicate_token_share": "The share of equal tokens in front, over rows that see one.",
    "induction_share": "The share of tokens behind another occurrence of the row's own, over rows that see one.",
}
_COLUMNS = on_page(COLUMNS)
_SHARES = [column for column in _COLUMNS if column.path in _SAYS]


def heads(report: InspectReport) -> list[Figure]:
    """Maps, heads across and blocks upwards."""
    known = [(place, b, b.heads.each) for place, b in enumerate(report.blocks) if b.heads is not None and b.heads.each]
    figures = []
    for column in _SHARES:
        if all(column.value(head) is None for _, _, each in known for head in each):
            continue
        columns = _COLUMNS if column is _SHARES[0] else [column]
        null = [Column((f"null: {c.name}", c.title[-1]), f"heads.uniform.{c.path}", c.form) for c in columns]
        figures.append(
            Figure(
                key=f"heads-{column.path}",
                title=f"What heads read by block and head: {column.name}",
                name=f"Heads: {column.name}",
                says=f"{_SAYS[column.path]} {_uniform([block for _, block, _ in known], column)}",
                picture=map_of_heads(known, column, 1.0),
                tables=[table_of_heads(known, columns, "blocks[].heads.each[]"), table_of_blocks(report.blocks, null)],
                terms=[f"blocks[].heads.each[].{column.path}"],
                notes=_without(report.blocks),
            )
        )
    return figures


def _uniform(blocks: Sequence[Block], column: Column) -> str:
    """What the null is, in a sentence; of several blocks its range."""
    values = [value for block in blocks if (value := value_at(block, f"heads.uniform.{column.path}")) is not None]
    ends = dict.fromkeys(numbers.percent(end) for end in (min(values), max(values))) if values else {"not known": None}
    return f"Null, H uniform over the tokens that a row may see: {' to '.join(ends)}{' %' if values else ''}."


def _without(blocks: Sequence[Block]) -> list[str]:
    none = [(block.index, block.heads.reasons.get("each")) for block in blocks if block.heads and not block.heads.each]
    return [f"Block {index}: {why}." for index, why in none]

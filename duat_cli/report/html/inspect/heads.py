"""What each attention head reads, with --heads: maps of the shares by block and head, of one scale of colours."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.blocks import across, table_of_blocks
from duat_cli.report.html.drawing.cells import cells, scale_of_cells
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band
from duat_cli.report.html.drawing.table import Head, Table
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.heads import Heads
from duat_cli.results.inspect import Block, InspectReport

_NUMBERS = (
    Column(("context", "tokens"), "effective_context", numbers.plain),
    Column(("entropy", "bits"), "entropy_bits", numbers.plain),
    Column(("mean distance", "tokens"), "mean_distance", numbers.plain),
)
_SHARES = (
    Column(("first token", "%"), "first_token_share", numbers.percent),
    Column(("current token", "%"), "current_token_share", numbers.percent),
    Column(("previous token", "%"), "previous_token_share", numbers.percent),
    Column(("duplicate token", "%"), "duplicate_token_share", numbers.percent),
    Column(("induction", "%"), "induction_share", numbers.percent),
)
_SAYS = {
    "first_token_share": "The share of a row that the first token has. Large: an attention sink.",
    "current_token_share": "The share of a row that its own token has.",
    "previous_token_share": "The share of a row that the token in front of it has.",
    "duplicate_token_share": "The share of equal tokens in front, over rows that see one.",
    "induction_share": "The share of tokens behind another occurrence of the row's own, over rows that see one.",
}


def heads(report: InspectReport) -> list[Figure]:
    """Maps, heads across and blocks upwards."""
    known = [(place, block, block.heads) for place, block in enumerate(report.blocks) if block.heads is not None]
    known = [entry for entry in known if entry[2].each]
    if not known:
        return []
    count = max(len(found.each or ()) for _, _, found in known)
    plot = Plot(
        Axis("head", Band([str(head) for head in range(count)], most=16)),
        across([block for _, block, _ in known], most=32),
        width=500,
        height=80 + min(480, max(16, 240 // len(known)) * len(known)),
    )
    figures = []
    for column in _SHARES:
        rows = [[value_at(head, column.path) for head in found.each or ()] for _, _, found in known]
        if all(value is None for row in rows for value in row):
            continue

        def said(r: int, c: int, name: str = column.name) -> str:
            return f"block {known[r][1].index}, head {c}, {name} in %"

        picture = plot.svg(
            cells(plot, rows, said, numbers.percent, 1.0), f"Map of {column.name}: heads across, blocks upwards."
        )
        columns = (*_NUMBERS, *_SHARES) if column is _SHARES[0] else (column,)
        null = [Column((f"null: {c.name}", c.title[-1]), f"heads.uniform.{c.path}", c.form) for c in columns]
        figures.append(
            Figure(
                key=f"heads-{column.path}",
                title=f"What heads read by block and head: {column.name}",
                name=f"Heads: {column.name}",
                says=f"{_SAYS[column.path]} {_uniform(known, column)}",
                picture=picture + scale_of_cells(100, signed=False),
                tables=[_table(known, columns), table_of_blocks(report.blocks, null)],
                terms=[f"blocks[].heads.each[].{column.path}"],
                notes=_without(report.blocks),
            )
        )
    return figures


def _uniform(known: Sequence[tuple[int, Block, Heads]], column: Column) -> str:
    """What the null is, in a sentence; of several blocks its range."""
    values = [value for _, _, found in known if (value := value_at(found, f"uniform.{column.path}")) is not None]
    ends = dict.fromkeys(numbers.percent(end) for end in (min(values), max(values))) if values else {"not known": None}
    return f"Null, H uniform over the tokens that a row may see: {' to '.join(ends)}{' %' if values else ''}."


def _table(known: Sequence[tuple[int, Block, Heads]], columns: Sequence[Column]) -> Table:
    """One row a head."""
    every = [(place, block, head) for place, block, found in known for head in found.each or ()]
    return Table(
        heads=[Head("head", "block.head"), *(Head(c.name, c.title[-1], c.path) for c in columns)],
        rows=[[f"{block.index}.{head.index}", *(column.cell(head) for column in columns)] for _, block, head in every],
        place="blocks[].heads.each[].",
        at=[f"blocks.{place}.heads.each.{head.index}" for place, _, head in every],
    )


def _without(blocks: Sequence[Block]) -> list[str]:
    none = [(block.index, block.heads.reasons.get("each")) for block in blocks if block.heads and not block.heads.each]
    return [f"Block {index}: {why}." for index, why in none]

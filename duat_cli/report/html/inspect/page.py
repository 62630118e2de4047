"""The sheet of `duat inspect`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import (
    half_wide,
    lines,
    map_of_heads,
    meanings,
    table_of_blocks,
    table_of_heads,
)
from duat_cli.report.html.drawing.elements import tag
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, sheet_of
from duat_cli.report.html.drawing.plot import level
from duat_cli.report.html.drawing.scales import Linear, Log
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.html.inspect.blocks import against_nulls, shares, terms
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import COLUMNS, SPECTRUM
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.report.tables.heads import COLUMNS as HEAD_COLUMNS
from duat_cli.report.tables.inspect import END_COLUMNS, ROUTING_COLUMNS
from duat_cli.results.inspect import Block, CouplingMap, InspectReport
from duat_cli.results.prompts import all_prompts
from duat_cli.text import plural

_OPERATOR = (
    *on_page(column for column in COLUMNS if column.path in SPECTRUM),
    *on_page(column for column in COLUMNS if column.path.startswith("density.")),
    Column(("density, from", "%"), "density.numerical_low", numbers.percent),
    Column(("density, to", "%"), "density.numerical_high", numbers.percent),
    *on_page(column for column in COLUMNS if column.path.startswith("coupling")),
)
_END_TO_END = (
    *on_page(END_COLUMNS),
    Column(("null: uniform, off-diagonal", "%"), "null.uniform.off_diagonal_share", numbers.percent),
    Column(("null: uniform, context", "tokens"), "null.uniform.effective_context", numbers.plain),
    Column(("null: uniform, mean distance", "tokens"), "null.uniform.mean_distance", numbers.plain),
    Column(("null: re-initialised, context", "tokens"), "null.reinitialised.effective_context", numbers.plain),
)
_ERRORS = (
    Column(("certificate error", "relative"), "certificate_error", numbers.error),
    Column(("error of W' factors", "relative"), "operator.certificate_error", numbers.error),
    Column(("largest activation", "as stored"), "range.largest_activation", numbers.plain),
    Column(("of the dtype's largest", "%"), "range.share", numbers.percent),
)
_ROUTING = on_page(sorted(ROUTING_COLUMNS, key=lambda column: not column.path.startswith("routing.r2")))
_LINES = [(column.path, series, column.name) for column, series in zip(_ROUTING, ("s2", "s3", "s1"), strict=False)]
_SAYS = {
    "first_token_share": "The share of a row that the first token has. Large: an attention sink.",
    "current_token_share": "The share of a row that its own token has.",
    "previous_token_share": "The share of a row that the token in front of it has.",
    "duplicate_token_share": "The share of equal tokens in front, over rows that see one.",
    "induction_share": "The share of tokens behind another occurrence of the row's own, over rows that see one.",
}
_HEADS = on_page(HEAD_COLUMNS)
_SHARES = [column for column in _HEADS if column.path in _SAYS]


def inspect_sheet(report: InspectReport, beside: Sequence[InspectReport]) -> Sheet:
    figures = [
        shares(report, beside),
        *against_nulls(report, beside),
        _coupling(report),
        terms(report, beside),
        _routing(report),
        *_heads(report),
        _certificate(report, beside),
        _statistics(report),
        _end_to_end(report),
    ]
    return sheet_of(report, all_prompts(report), _tiles(report), [("Notable", report.summary.notable)], figures)


def _tiles(report: InspectReport) -> list[Tile]:
    summary = report.summary
    return [
        Tile("linear share", numbers.percent(summary.linear_share), "%", "summary.linear_share"),
        Tile("static share", numbers.percent(summary.static_share), "%", "summary.static_share"),
        Tile("UAT share", numbers.percent(summary.dynamic_share), "%", "summary.dynamic_share"),
        Tile("effective context", numbers.plain(summary.effective_context), "tokens", "summary.effective_context"),
        Tile("structural density", numbers.percent(summary.structural_density), "%", "summary.structural_density"),
    ]


def _coupling(report: InspectReport) -> Figure | None:
    """An element in which the page's script draws the maps of the embedded report; None where there are no maps."""
    if not report.maps:
        return None
    return Figure(
        key="coupling",
        title="Coupling of tokens through W': C, from token (column) to token (row)",
        says="Each cell is the size of the block of W' that leads from one token to another, |B_ij|_F. Left and right "
        "change the block when the choice of block has the focus; on the map the arrow keys move from cell to cell.",
        picture=tag("div", tag("noscript", "The map is drawn by the page's script, which is off."), class_="map"),
        tables=[],
        terms=["maps[].blocks[].coupling"],
        notes=[note for found in report.maps if (note := _cut(found))],
    )


def _cut(found: CouplingMap) -> str:
    shown = len(found.tokens)
    if shown == found.total_tokens:
        return ""
    return f"Prompt {found.prompt}: the first {shown} of {plural(found.total_tokens, 'token')} are shown."


def _routing(report: InspectReport) -> Figure | None:
    if all(block.routing is None for block in report.blocks):
        return None
    plot = half_wide(report.blocks, "share of the scores' variance (%)", Linear(0, 1, percent=True))
    drawn = lines(plot, report.blocks, _LINES, numbers.share)
    return Figure(
        key="routing",
        half=True,
        title="What the scores of attention are explained by",
        says="R^2 of the scores before the softmax, mean over heads. What W_QK leaves is positions and biases.",
        picture=plot.svg(drawn, "Three lines over blocks: by x.x, by the covariance of tokens, by W_QK."),
        tables=[table_of_blocks(report.blocks, _ROUTING)],
        terms=[f"blocks[].{column.path}" for column in _ROUTING],
        legend=meanings("line", _LINES),
    )


def _heads(report: InspectReport) -> list[Figure]:
    known = [(place, b, b.heads.each) for place, b in enumerate(report.blocks) if b.heads is not None and b.heads.each]
    figures = []
    for column in _SHARES:
        if all(column.value(head) is None for _, _, each in known for head in each):
            continue
        columns = _HEADS if column is _SHARES[0] else [column]
        null = [Column((f"null: {c.name}", c.title[-1]), f"heads.uniform.{c.path}", c.form) for c in columns]
        figures.append(
            Figure(
                key=f"heads-{column.path}",
                half=True,
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
    """A sentence on the null; for several blocks, its range."""
    values = [value for block in blocks if (value := value_at(block, f"heads.uniform.{column.path}")) is not None]
    ends = dict.fromkeys(numbers.percent(end) for end in (min(values), max(values))) if values else {"not known": None}
    return f"Null, H uniform over the tokens that a row may see: {' to '.join(ends)}{' %' if values else ''}."


def _without(blocks: Sequence[Block]) -> list[str]:
    none = [(block.index, block.heads.reasons.get("each")) for block in blocks if block.heads and not block.heads.each]
    return [f"Block {index}: {why}." for index, why in none]


def _certificate(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """A plot of errors by block with the tolerance; errors of exactly zero have no place on the axis."""
    if not report.blocks:
        return None
    errors = [block.certificate_error for block in report.blocks]
    every = [b.certificate_error for r in beside for b in r.blocks] + [r.certificate.tolerance for r in beside]
    plot = half_wide(report.blocks, "relative error of the output", Log.over(every))
    drawn = [level(plot, report.certificate.tolerance, f"tolerance {report.certificate.tolerance:.0e}")]
    drawn += [
        marks.dot(plot.x(i), plot.y(e), "s1", f"block {report.blocks[i].index}: {numbers.error(e)}")
        for i, e in enumerate(errors)
        if e > 0
    ]
    notes = ["Blocks whose error is 0 have no place on this axis."] if not all(errors) else []
    return Figure(
        key="certificate",
        half=True,
        title="How exact each block is: its rebuilt output against the model's own",
        says="The largest over the prompts. What stands below the dashed line is within the arithmetic's tolerance.",
        picture=plot.svg(drawn, "Relative error of every block, and the tolerance."),
        tables=[table_of_blocks(report.blocks, _ERRORS)],
        terms=["blocks[].certificate_error", "certificate.plain_error", "certificate.tolerance"],
        legend=[("dot", "s1", "relative error"), ("rule", "s1", "tolerance")],
        notes=notes,
    )


def _statistics(report: InspectReport) -> Figure | None:
    if not report.blocks:
        return None
    first = report.blocks[0].density
    return Figure(
        key="statistics",
        title="All statistics of W' by block",
        says=f"Means over the prompts. Density counts entries above {first.threshold:g} root mean square entries; a "
        f"linear layer has {numbers.percent(first.linear_reference)} %, a 1-D convolution of width {first.conv_width} "
        f"{numbers.percent(first.conv1d_reference)} %.",
        tables=[table_of_blocks(report.blocks, _OPERATOR)],
        terms=["blocks[].operator", "blocks[].density.linear_reference", "blocks[].density.conv1d_reference"],
    )


def _end_to_end(report: InspectReport) -> Figure | None:
    if report.end_to_end is None:
        return None
    return Figure(
        key="end-to-end",
        title="End to end: how tokens of the first block's input reach the last output",
        says="The linear path through all blocks, the residual path included.",
        tables=[table_of([report.end_to_end], Head("blocks"), lambda _: "all", _END_TO_END, "end_to_end")],
        terms=["end_to_end", "end_to_end.coupling"],
    )

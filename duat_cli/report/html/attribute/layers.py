"""Where a prediction is formed: its parts by block and token, and by block alone."""

from __future__ import annotations

from duat_cli.report.html.drawing.cells import cells, scale_of_cells
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.series import curve, level
from duat_cli.report.html.drawing.table import Head, Table
from duat_cli.report.tables.attribute.report import SIGNED
from duat_cli.report.tables.attribute.words import by_block, by_token, title, token
from duat_cli.results.attribute import AttributeReport

_TOKENS = 64  # of a map; those with the largest parts of a longer prompt
_SERIES = (("UAT terms, through later blocks", "s1"), ("biases, through later blocks", "s2"),
           ("heads, straight to the logit", "s3"), ("UAT terms, straight to the logit", "s4"))  # fmt: skip


def token_by_layer(report: AttributeReport, number: int) -> Figure:
    """A map: blocks upwards, tokens across."""
    one = report.attribution[number]
    rows = by_token(one)
    weight = [sum(abs(row[t]) for row in rows) for t in range(len(one.parts.tokens))]
    kept = sorted(sorted(range(len(weight)), key=lambda t: -weight[t])[:_TOKENS])
    names = ["x_0", *(str(block) for block in range(len(rows) - 1))]
    values = [[row[t] for t in kept] for row in rows]
    plot = Plot(
        Axis("token (position)", Band([str(one.parts.tokens[t].position) for t in kept], most=32)),
        Axis("block", Band(names, most=24)),
        height=90 + min(400, 24 * len(rows)),
    )
    drawn = cells(plot, values, lambda r, c: f"{_row(names[r])}, token {token(one, kept[c])}")
    table = Table(
        heads=[Head("token", number=False), *(Head(name, "logits") for name in names)],
        rows=[[token(one, t), *(SIGNED(row[t]) for row in rows)] for t in kept],
    )
    left = len(weight) - len(kept)
    return Figure(
        key=f"layers-{number}",
        wide=True,
        title=f"Where it is formed: parts by block and token, {title(one, len(report.prompts))}",
        says="x_0 is the token's embedding; the rows above are the UAT terms that each block computed at the token. A "
        "dash marks parts against the prediction.",
        picture=plot.svg(drawn, "Map of parts, a row a block, a column a token.")
        + scale_of_cells(max((abs(v) for row in values for v in row), default=0.0)),
        tables=[table],
        terms=["attribution[].parts.units[].tokens", "attribution[].parts.tokens[].value"],
        notes=[f"{left} tokens with smaller parts are left out."] if left else [],
    )


def blocks(report: AttributeReport, number: int) -> Figure:
    """Lines over blocks: what each adds, total and direct."""
    one = report.attribution[number]
    columns = by_block(one)
    names = [str(block) for block in range(len(one.parts.static.blocks))]
    plot = Plot(
        Axis("block", Band(names, most=12)),
        Axis("part (logits)", Linear.over([v for column in columns for v in column])),
        width=500,
        height=260,
    )
    drawn = [level(plot, 0.0)]
    for (name, series), values in zip(_SERIES, columns, strict=True):
        drawn += curve(plot, values, series, [_row(block) for block in names], name, SIGNED)
    return Figure(
        key=f"blocks-{number}",
        title=f"What each block adds: {title(one, len(report.prompts))}",
        says="Two readings, each adding up to the logit with the tokens: through all later blocks, and straight to it.",
        picture=plot.svg(drawn, "Four lines over blocks."),
        tables=[
            Table(
                heads=[Head("block"), *(Head(name, "logits") for name, _ in _SERIES)],
                rows=[[names[b], *(SIGNED(column[b]) for column in columns)] for b in range(len(names))],
            )
        ],
        terms=["attribution[].parts.static.blocks", "attribution[].direct.units[].value"],
        legend=[("line", series, name) for name, series in _SERIES],
    )


def _row(name: str) -> str:
    return "embedding" if name == "x_0" else f"block {name}"

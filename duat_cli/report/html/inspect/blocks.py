"""Figures on the parts of the stream behind each block, and on statistics of W' compared with their nulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import half_wide, lines, meanings, stacked, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot, stack
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import COLUMNS, for_tokens, has_encoder, heads_of, of_one_token, scaled
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.report.tables.inspect import TERM_COLUMNS
from duat_cli.results.inspect import InspectReport, Spread
from duat_cli.text import plural

_COLUMNS = (
    *on_page(column for column in COLUMNS if column.path.startswith("terms.")),
    Column(("norm of the linear part", "of the output's"), "terms.linear.norm", numbers.plain),
    Column(("norm of the static part", "of the output's"), "terms.static.norm", numbers.plain),
    Column(("norm of the UAT part", "of the output's"), "terms.dynamic.norm", numbers.plain),
)
_PARTS = (
    ("terms.linear.share", "s1", "linear: the input's path"),
    ("terms.static.share", "s2", "static: biases"),
    ("terms.dynamic.share", "s3", "UAT terms"),
    ("terms.encoder.share", "s4", "the encoder's states"),
)
_TERM = on_page(TERM_COLUMNS)
_BEFORE = tuple(
    Column((name, "%"), f"terms.pre_activation.{part}.share", numbers.percent)
    for part, name in (("linear", "linear"), ("static", "static"), ("dynamic", "UAT terms"))
)
_SERIES = {"linear": "s1", "static": "s2", "dynamic": "s3", "encoder": "s4"}
_FEW = 32  # up to so many blocks, points are drawn at full size
_KINDS = (("reinitialised", "s2", "re-initialised"), ("uniform", "s3", "uniform attention"))


@dataclass(frozen=True)
class _Statistic:
    key: str
    name: str
    column: Column
    """The column with the axis's title and unit."""
    says: str


_STATISTICS = (
    _Statistic(
        "heads",
        "Effective heads",
        Column(("effective heads", "of {heads}"), "operator.effective_heads", numbers.plain),
        "How many different Kronecker products make W': 1 where all heads do the same.",
    ),
    _Statistic(
        "correlation",
        "Correlation of the blocks of W'",
        Column(("correlation", "0 to 1"), "operator.block_correlation", numbers.plain),
        "1 where every pair of tokens is coupled by the same matrix up to a factor.",
    ),
    _Statistic(
        "context",
        "Effective context",
        Column(("context", "tokens"), "coupling.effective_context", numbers.plain),
        "How many tokens reach a token through W', mean over tokens.",
    ),
    _Statistic(
        "density",
        "Density of W'",
        Column(("density", "%"), "density.numerical", numbers.percent),
        "Share of entries of W' above the threshold.",
    ),
)


def shares(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    """Stacked bars over blocks; shares below zero, which point against the stream, hang below the line."""
    if not report.blocks:
        return None
    every = [block for other in beside for block in other.blocks]
    present = [part for part in _PARTS if part[0] != "terms.encoder.share" or has_encoder(report)]
    names = ", ".join(name for _, _, name in present)
    about = f"Stacked bars over {plural(len(report.blocks), 'block')}: {names}."
    columns = [c for c in _COLUMNS if has_encoder(report) or not c.path.startswith("terms.encoder")]
    tables, single = [table_of_blocks(report.blocks, columns)], ""
    if of_one_token(report):
        tables.append(table_of_blocks(report.blocks, on_page(for_tokens(report))))
        single = " In some block one token has more than half of the squared norm, and its bar is mostly that token's; "
        single += "those at a typical token are under More numbers."
    return Figure(
        key="shares",
        title="What makes the stream behind each block: linear, static and UAT parts",
        says="Everything up to a block's output, split exactly; the shares sum to 100 %. A share below zero "
        f"points against the stream.{single}",
        picture=stacked(report.blocks, every, _PARTS, "share of the block's output (%)", about, least=1.0),
        tables=tables,
        terms=[
            *(f"blocks[].{path.removesuffix('.share')}" for path, _, _ in present),
            "blocks[].terms.linear.share",
            "blocks[].terms.own",
        ],
        legend=meanings("bar", present),
    )


def terms(report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    if not report.terms:
        return None
    every = [term.share for other in beside for term in other.terms or []]
    plot = Plot(
        Axis("term of the sum", Band([t.name if t.block is None else str(t.block) for t in report.terms], most=14)),
        Axis("share of the last output (%)", Linear.over(every, percent=True)),
    )
    drawn = []
    for place, term in enumerate(report.terms):
        said = f"{term.name}: {numbers.percent(term.share)} %"
        drawn += stack(plot, place, [(term.share, _SERIES[term.kind], said)])
    return Figure(
        key="terms",
        title="What each term of the sum makes of the last block's output",
        says="x_0 is the linear path from the first block's input, bias all static parts together, a number the UAT "
        "term that this block's FFN makes. All shares sum to 100 %.",
        picture=plot.svg(drawn, "A bar for each term of the sum."),
        tables=[
            table_of(report.terms, Head("term", number=False), lambda term: term.name, _TERM, "terms[]", "term"),
            table_of_blocks(report.blocks, _BEFORE),
        ],
        terms=["terms[].share", "blocks[].terms.pre_activation"],
    )


def against_nulls(report: InspectReport, beside: Sequence[InspectReport]) -> list[Figure]:
    return [figure for s in _STATISTICS if (figure := _figure(s, report, beside)) is not None]


def _figure(statistic: _Statistic, report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    column = scaled(statistic.column, heads_of(report))
    (name, unit), path, form = column.title, column.path, column.form
    if all(value_at(block, path) is None for block in report.blocks):
        return None
    own = (path, "s1", "this model")
    nulls = {kind: (f"null.{kind}.{path}", series, called) for kind, series, called in _KINDS}
    every = [value_at(block, at) for one in beside for block in one.blocks for at, _, _ in (own, *nulls.values())]
    every += [end for one in beside for _, spread in _spreads(one, path) for end in (spread.low, spread.high)]
    plot = half_wide(report.blocks, f"{name} ({unit})", Linear.over(every, percent=unit == "%"))
    kinds = [kind for kind in nulls if any(getattr(block.null, kind) is not None for block in report.blocks)]
    known, spreads = [nulls[kind] for kind in kinds], _spreads(report, path)
    drawn = [
        *(marks.span(plot.x(place), plot.y(s.low), plot.x(place), plot.y(s.high), "s1") for place, s in spreads),
        *lines(plot, report.blocks, [*known, own], form, size=4.0 if len(report.blocks) <= _FEW else 2.5),
    ]
    columns = [Column(("this model", unit), path, form)]
    columns += [Column((f"null: {called}", unit), at, form) for at, _, called in nulls.values()]
    ends = [("span", "s1", "lowest to highest over the prompts")] if spreads else []
    return Figure(
        key=statistic.key,
        half=True,
        title=f"{statistic.name}, beside what it is without training",
        says=f"{statistic.says} Only what differs from both nulls was learned.",
        picture=plot.svg(drawn, f"{statistic.name} of every block: this model and its nulls."),
        tables=[table_of_blocks(report.blocks, columns)],
        terms=[f"blocks[].{path}", *(f"blocks[].null.{kind}" for kind in kinds)],
        legend=[*meanings("line", [own, *known]), *ends],
    )


def _spreads(report: InspectReport, path: str) -> list[tuple[int, Spread]]:
    """Places of blocks, with the spread of a number over the prompts, with --per-prompt."""
    return [(place, s) for place, block in enumerate(report.blocks) if (s := (block.spreads or {}).get(path))]

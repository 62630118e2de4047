"""Statistics of W' beside what they are where nothing was learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import half_wide, line_over, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Plot, Sample
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import heads_of, scaled
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.inspect import Block, InspectReport

_FEW = 32  # blocks up to which points have room for their full size
_KINDS = (("reinitialised", "s2", "re-initialised"), ("uniform", "s3", "uniform attention"))


@dataclass(frozen=True)
class _Statistic:
    key: str
    name: str
    column: Column
    """As its axis names it, with its unit."""
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


def against_nulls(report: InspectReport, beside: Sequence[InspectReport]) -> list[Figure]:
    """One figure a statistic, each with its own axis."""
    return [figure for s in _STATISTICS if (figure := _figure(s, report, beside)) is not None]


def _figure(statistic: _Statistic, report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    column = scaled(statistic.column, heads_of(report))
    name, unit = column.title
    if all(value_at(block, column.path) is None for block in report.blocks):
        return None
    every = [value for other in beside for block in other.blocks for value in _values(column.path, block)]
    plot = half_wide(report.blocks, f"{name} ({unit})", Linear.over(every, percent=unit == "%"))
    kinds = [kind for kind in _KINDS if any(getattr(block.null, kind[0]) is not None for block in report.blocks)]
    drawn = [
        *_spreads(plot, column.path, report.blocks),
        *(mark for kind in kinds for mark in _series(plot, column, report.blocks, *kind)),
        *_series(plot, column, report.blocks, "", "s1", "this model"),
    ]
    return Figure(
        key=statistic.key,
        title=f"{statistic.name}, beside what it is without training",
        says=f"{statistic.says} Only what differs from both nulls was learned.",
        picture=plot.svg(drawn, f"{statistic.name} of every block: this model and its nulls."),
        tables=[table_of_blocks(report.blocks, _columns(column))],
        terms=[f"blocks[].{column.path}", *(f"blocks[].null.{kind}" for kind, _, _ in kinds)],
        legend=_meanings(kinds, any((b.spreads or {}).get(column.path) for b in report.blocks)),
    )


def _meanings(kinds: Sequence[tuple[str, str, str]], spreads: bool) -> list[Sample]:
    found = [("line", "s1", "this model")]
    found += [("hollow line", series, name) for _, series, name in kinds]
    return [*found, ("span", "s1", "lowest to highest over the prompts")] if spreads else found


def _values(path: str, block: Block) -> list[float | None]:
    paths = (path, *(f"null.{kind}.{path}" for kind, _, _ in _KINDS))
    spread = (block.spreads or {}).get(path)
    return [*(value_at(block, one) for one in paths), *((spread.low, spread.high) if spread else ())]


def _series(plot: Plot, column: Column, blocks: Sequence[Block], kind: str, series: str, name: str) -> list[Mark]:
    path = f"null.{kind}.{column.path}" if kind else column.path
    size = 4.0 if len(blocks) <= _FEW else 2.5
    return line_over(plot, blocks, path, series, name, column.form, hollow=bool(kind), size=size)


def _spreads(plot: Plot, path: str, blocks: Sequence[Block]) -> list[Mark]:
    """The smallest and largest over the prompts, with --per-prompt."""
    found = [(place, spread) for place, b in enumerate(blocks) if (spread := (b.spreads or {}).get(path))]
    return [marks.span(plot.x(p), plot.y(s.low), plot.x(p), plot.y(s.high), "s1") for p, s in found]


def _columns(column: Column) -> list[Column]:
    named = [("this model", column.path)]
    named += [(f"null: {name}", f"null.{kind}.{column.path}") for kind, _, name in _KINDS]
    return [Column((name, column.title[-1]), path, column.form) for name, path in named]

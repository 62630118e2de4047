"""Statistics of W' beside what they are where nothing was learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, block_names, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot, Sample
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.series import curve
from duat_cli.report.tables import numbers
from duat_cli.report.tables.columns import heads_of
from duat_cli.report.tables.grid import Column, value_at
from duat_cli.results.inspect import Block, InspectReport

_FEW = 32  # blocks up to which points have room for their full size
_KINDS = (("reinitialised", "s2", "re-initialised"), ("uniform", "s3", "uniform attention"))


@dataclass(frozen=True)
class _Statistic:
    key: str
    name: str
    axis: str
    unit: str
    path: str
    form: Callable[[float | None], str]
    says: str

    @property
    def percent(self) -> bool:
        return self.unit == "%"


_STATISTICS = (
    _Statistic(
        "heads",
        "Effective heads",
        "effective heads",
        "of {heads}",
        "operator.effective_heads",
        numbers.plain,
        "How many different Kronecker products make W': 1 where all heads do the same.",
    ),
    _Statistic(
        "correlation",
        "Correlation of the blocks of W'",
        "correlation",
        "0 to 1",
        "operator.block_correlation",
        numbers.plain,
        "1 where every pair of tokens is coupled by the same matrix up to a factor.",
    ),
    _Statistic(
        "context",
        "Effective context",
        "context",
        "tokens",
        "coupling.effective_context",
        numbers.plain,
        "How many tokens reach a token through W', mean over tokens.",
    ),
    _Statistic(
        "density",
        "Density of W'",
        "density",
        "%",
        "density.numerical",
        numbers.percent,
        "Share of entries of W' above the threshold.",
    ),
)


def against_nulls(report: InspectReport, beside: Sequence[InspectReport]) -> list[Figure]:
    """One figure a statistic, each with its own axis."""
    return [figure for s in _STATISTICS if (figure := _figure(s, report, beside)) is not None]


def _figure(statistic: _Statistic, report: InspectReport, beside: Sequence[InspectReport]) -> Figure | None:
    if all(value_at(block, statistic.path) is None for block in report.blocks):
        return None
    every = [value for other in beside for block in other.blocks for value in _values(statistic, block)]
    unit = statistic.unit.format(heads=heads_of(report))
    plot = Plot(
        across(report.blocks, most=12),
        Axis(f"{statistic.axis} ({unit})", Linear.over(every, percent=statistic.percent)),
        width=500,
        height=250,
    )
    kinds = [kind for kind in _KINDS if any(getattr(block.null, kind[0]) is not None for block in report.blocks)]
    drawn = [
        *_spreads(plot, statistic, report.blocks),
        *(mark for kind in kinds for mark in _series(plot, statistic, report.blocks, *kind)),
        *_series(plot, statistic, report.blocks, "", "s1", "this model"),
    ]
    return Figure(
        key=statistic.key,
        title=f"{statistic.name}, beside what it is without training",
        says=f"{statistic.says} Only what differs from both nulls was learned.",
        picture=plot.svg(drawn, f"{statistic.name} of every block: this model and its nulls."),
        tables=[table_of_blocks(report.blocks, _columns(statistic, unit))],
        terms=[f"blocks[].{statistic.path}", *(f"blocks[].null.{kind}" for kind, _, _ in kinds)],
        legend=_meanings(kinds, any((b.spreads or {}).get(statistic.path) for b in report.blocks)),
    )


def _meanings(kinds: Sequence[tuple[str, str, str]], spreads: bool) -> list[Sample]:
    found = [("line", "s1", "this model")]
    found += [("hollow line", series, name) for _, series, name in kinds]
    return [*found, ("span", "s1", "lowest to highest over the prompts")] if spreads else found


def _values(statistic: _Statistic, block: Block) -> list[float | None]:
    paths = (statistic.path, *(f"null.{kind}.{statistic.path}" for kind, _, _ in _KINDS))
    spread = (block.spreads or {}).get(statistic.path)
    return [*(value_at(block, path) for path in paths), *((spread.low, spread.high) if spread else ())]


def _series(
    plot: Plot, statistic: _Statistic, blocks: Sequence[Block], kind: str, series: str, name: str
) -> list[Mark]:
    path = f"null.{kind}.{statistic.path}" if kind else statistic.path
    values, size = [value_at(block, path) for block in blocks], 4.0 if len(blocks) <= _FEW else 2.5
    return curve(plot, values, series, block_names(blocks), name, statistic.form, hollow=bool(kind), size=size)


def _spreads(plot: Plot, statistic: _Statistic, blocks: Sequence[Block]) -> list[Mark]:
    """The smallest and largest over the prompts, with --per-prompt."""
    found = [(place, spread) for place, b in enumerate(blocks) if (spread := (b.spreads or {}).get(statistic.path))]
    return [marks.span(plot.x(p), plot.y(s.low), plot.x(p), plot.y(s.high), "s1") for p, s in found]


def _columns(statistic: _Statistic, unit: str) -> list[Column]:
    named = [("this model", statistic.path)]
    named += [(f"null: {name}", f"null.{kind}.{statistic.path}") for kind, _, name in _KINDS]
    return [Column((name, unit), path, statistic.form) for name, path in named]

"""The statistics of W' beside their nulls: what the value is without training, and how far it is from that."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.columns import COLUMNS, scaled
from duat_cli.report.tables.grid import BLOCK, Column, missing, reason_at, titled, together, value_at
from duat_cli.report.tables.page import BLANK, Page, line
from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.inspect import Block

_NAMES = {"reinitialised": "the architecture re-initialised", "uniform": "uniform H, same weights"}
_FIELDS = {  # name of the row's field -> its column in the table of the statistics
    name: next(column for column in COLUMNS if column.path == path)
    for name, path in (
        ("heads", "operator.effective_heads"),
        ("correlation", "operator.block_correlation"),
        ("density", "density.numerical"),
        ("off_diagonal", "coupling.off_diagonal_share"),
        ("context", "coupling.effective_context"),
    )
}
NAMED = [
    Column((*c.title[:-1], kind, c.title[-1]), f"null.reinitialised.{c.path}", c.form)
    for c in _FIELDS.values()
    for kind in ("null", "diff.")
]
"""The columns by their headers, each at the null's place in the report; "diff." is no field of it."""


class _Beside(WithReasons):
    null: Finite | None
    difference: Finite | None  # of the value from it


class _Row(Result):
    index: int
    heads: _Beside
    correlation: _Beside
    density: _Beside
    off_diagonal: _Beside
    context: _Beside


def null_tables(blocks: Sequence[Block], heads: str, page: Page) -> list[RenderableType]:
    """The null of every block and the difference from it; the other null as means over the blocks."""
    if not blocks:
        return []
    kind = next((k for k in _NAMES if any(getattr(block.null, k) is not None for block in blocks)), None)
    absent = _absent(blocks)
    if kind is None:
        return facts.absences(absent, "block")
    rows = [
        _Row(index=block.index, **{name: _beside(block, kind, column.path) for name, column in _FIELDS.items()})
        for block in blocks
        if getattr(block.null, kind) is not None
    ]
    columns = _columns(heads)
    other = "uniform" if kind != "uniform" else None
    return [
        *titled(f"Null: {_NAMES[kind]}; diff.: value less null", rows, BLOCK, columns, page),
        BLANK,
        *([line(_means(blocks, other, heads), "dim")] if other else []),
        *facts.absences([*missing(rows, columns, [row.index for row in rows]), *absent], "block"),
    ]


def _absent(blocks: Sequence[Block]) -> list[tuple[str, str, list[int]]]:
    """(null, reason, blocks) of the nulls that blocks have not, where that is not for want of the block's own W'."""
    found: dict[tuple[str, str], list[int]] = {}
    for kind, name in _NAMES.items():
        for block in blocks:
            reason = block.null.reasons.get(kind, "no reason was given")
            if getattr(block.null, kind) is None and reason != reason_at(block, "operator.effective_heads"):
                found.setdefault((name, reason), []).append(block.index)
    return [(f"null ({names})", reason, at) for names, reason, at in together(found, "; ")]


def _beside(block: Block, kind: str, path: str) -> _Beside:
    value, place = value_at(block, path), f"null.{kind}.{path}"
    null = value_at(block, place)
    reasons = {}
    if null is None:
        reasons["null"] = reasons["difference"] = reason_at(block, place) or ""
    elif value is None:
        reasons["difference"] = reason_at(block, path) or ""
    known = value is not None and null is not None
    return _Beside(null=null, difference=value - null if known else None, reasons=reasons)  # type: ignore[operator]


def _columns(heads: str) -> list[Column]:
    found = []
    for name, statistic in _FIELDS.items():
        (*title, unit), form = scaled(statistic, heads).title, statistic.form
        found.append(Column((*title, "null", unit), f"{name}.null", form))
        found.append(Column((*title, "diff.", unit), f"{name}.difference", numbers.signed(form)))
    return found


def _means(blocks: Sequence[Block], kind: str, heads: str) -> str:
    parts = []
    for column in _FIELDS.values():
        known = [v for block in blocks if (v := value_at(block, f"null.{kind}.{column.path}")) is not None]
        mean = column.form(statistics.fmean(known) if known else None)
        unit = {"0-1": "", "/{heads}": f" of {heads}"}.get(column.title[-1], f" {column.title[-1]}")
        parts.append(f"{column.name} {mean}{unit}")
    return f"null: {_NAMES[kind]}, mean over blocks: {', '.join(parts)}."

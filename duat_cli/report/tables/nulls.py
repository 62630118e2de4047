"""Statistics of W' with their nulls, the values without training, and the differences from these."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.columns import COLUMNS, scaled
from duat_cli.report.tables.grid import BLOCK, NO_REASON, Column, missing, reason_at, titled, together, value_at
from duat_cli.report.tables.page import BLANK, Page, note
from duat_cli.results.base import Result
from duat_cli.results.inspect import Block

_NAMES = {"reinitialised": "the architecture re-initialised", "uniform": "uniform H, same weights"}
_COMPARED = {
    "operator.effective_heads",
    "operator.block_correlation",
    "density.numerical",
    "coupling.off_diagonal_share",
    "coupling.effective_context",
}
ROUNDING = 1e-6  # relative; a smaller difference is that of the arithmetic
_STATISTICS = [column for column in COLUMNS if column.path in _COMPARED]


@dataclass(frozen=True, kw_only=True)
class _Difference(Column):
    """Column of the difference between a statistic and its null. path: of the null."""

    statistic: str

    def value(self, row: Result) -> float | None:
        value, null = value_at(row, self.statistic), value_at(row, self.path)
        if value is None or null is None:
            return None
        return 0.0 if math.isclose(value, null, rel_tol=ROUNDING) else value - null

    def reason(self, row: Result) -> str | None:
        return reason_at(row, self.path) or reason_at(row, self.statistic)


def _columns(kind: str) -> list[Column]:
    """For each statistic, the columns of its null of this kind and of the difference from it."""
    found: list[Column] = []
    for column in _STATISTICS:
        (*title, unit), null = column.title, f"null.{kind}.{column.path}"
        found.append(Column((*title, "null", unit), null, column.form))
        signed = numbers.signed(column.form)
        found.append(_Difference((*title, "diff.", unit), null, signed, statistic=column.path))
    return found


NAMED = _columns("reinitialised")
"""The columns with their headers, each with the null's path in the report; "diff." has no field of its own."""


def null_tables(blocks: Sequence[Block], heads: str, page: Page) -> list[RenderableType]:
    """Table with the null of every block and the difference from it; the other null as means over the blocks."""
    if not blocks:
        return []
    kind = next((k for k in _NAMES if any(getattr(block.null, k) is not None for block in blocks)), None)
    absent = _absent(blocks)
    if kind is None:
        return facts.absences(absent, "block")
    rows = [block for block in blocks if getattr(block.null, kind) is not None]
    columns = [scaled(column, heads) for column in _columns(kind)]
    other = "uniform" if kind != "uniform" else None
    return [
        *titled(f"Null: {_NAMES[kind]}; diff.: value less null", rows, BLOCK, columns, page),
        BLANK,
        *([note(_means(blocks, other, heads))] if other else []),
        *facts.absences([*missing(rows, columns, [row.index for row in rows]), *absent], "block"),
    ]


def _absent(blocks: Sequence[Block]) -> list[tuple[str, str, list[int]]]:
    """(null, reason, blocks) of missing nulls, unless they are missing because the block has no W'."""
    absent = (
        ((name, reason), block.index)
        for kind, name in _NAMES.items()
        for block in blocks
        if getattr(block.null, kind) is None
        and (reason := block.null.reasons.get(kind, NO_REASON)) != reason_at(block, "operator.effective_heads")
    )
    return [(f"null ({names})", reason, at) for names, reason, at in together(absent, "; ")]


def _means(blocks: Sequence[Block], kind: str, heads: str) -> str:
    parts = []
    for column in _STATISTICS:
        known = [v for block in blocks if (v := value_at(block, f"null.{kind}.{column.path}")) is not None]
        mean = column.form(statistics.fmean(known) if known else None)
        unit = {"0-1": "", "/{heads}": f" of {heads}"}.get(column.title[-1], f" {column.title[-1]}")
        parts.append(f"{column.name} {mean}{unit}")
    return f"null: {_NAMES[kind]}, mean over blocks: {', '.join(parts)}."

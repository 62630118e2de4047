"""Eq. 16 with the model itself as f, as text: the bound beside the measured change, for sets and for whole parts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import BLOCK, Column, Labels, filled, spaced
from duat_cli.report.tables.page import BLANK, Page, heading, line, note
from duat_cli.results.base import Result
from duat_cli.results.prune.eq16 import Eq16
from duat_cli.results.prune.report import PruneReport
from duat_cli.text import plural

ROOMY = 120  # width from which a page has the tables, which are not needed to choose a set
_SET = Labels(("what",), lambda row: row.name, False)


class _Parts(Result):
    """The whole parts of one block side by side."""

    index: int
    block: Eq16 | None
    attention: Eq16 | None
    ffn: Eq16 | None


def eq16(report: PruneReport, page: Page) -> list[RenderableType]:
    """Tables and verdict on Eq. 16; nothing where it was not computed."""
    if not report.eq16:
        return []
    title = "Eq. 16, f the model itself: norms at the last block's output, relative to that output's own"
    if not page.wide and page.width < ROOMY:
        return [
            BLANK,
            heading(title),
            *_verdict(report.eq16),
            note("The bound of each set and part: --wide, or a page of 120 columns."),
        ]
    sets = [row for row in report.eq16 if row.what == "set"]
    parts = _by_block([row for row in report.eq16 if row.what == "part"])
    prompts = f"{report.eq16[0].prompts} of {plural(len(report.prompts), 'prompt')}"
    reacting = "; measured: with everything reacting" if any(row.measured is not None for row in report.eq16) else ""
    return [
        BLANK,
        heading(title),
        *(spaced(sets, _SET, filled(sets, _SET_COLUMNS), page) if sets else []),
        *(spaced(parts, BLOCK, filled(parts, _PART_COLUMNS), page) if parts else []),
        BLANK,
        note(
            "bound: norm of the sum of the removed terms, each carried there through the frozen blocks; held: change "
            f"with all dynamic parameters held{reacting}. Means over {prompts}."
        ),
        *_verdict(report.eq16),
    ]


def _verdict(rows: Sequence[Eq16]) -> list[RenderableType]:
    error = max(row.error for row in rows)
    held = f"Held, the removal changes the output by the bound's own vector, to {numbers.error(error)}."
    known = [row for row in rows if row.exceeded is not None]
    above = [row for row in known if row.exceeded]
    if not known:
        return [line(held)]
    if not above:
        return [line(f"{held} Measured, it does not exceed the bound for any of these {len(known)} here.")]
    worst = max(above, key=lambda row: row.ratio_largest or 0.0)
    most = (
        "" if worst.ratio_largest is None else f", by up to {numbers.plain(worst.ratio_largest)} times ({_of(worst)})"
    )
    return [
        line(
            f"{held} The bound is of fixed parameters. Once these react it does not hold: what is measured exceeds it "
            f"for {len(above)} of {len(known)} sets and parts{most}.",
            "yellow",
        )
    ]


def _of(row: Eq16) -> str:
    if row.kind is None:
        return f"the set of {row.name}"
    kind = "FFN" if row.kind == "ffn" else row.kind
    return f"block {row.block}" if kind == "block" else f"{kind} of block {row.block}"


def _by_block(rows: Sequence[Eq16]) -> list[_Parts]:
    """Whole parts by block; of several FFNs in a block, the one with the largest bound."""
    found: dict[int, dict[str, Eq16]] = {}
    for row in sorted(rows, key=lambda row: row.bound):
        if row.block is not None and row.kind is not None:
            found.setdefault(row.block, {})[row.kind] = row
    return [
        _Parts(index=k, **{kind: found[k].get(kind) for kind in ("block", "attention", "ffn")}) for k in sorted(found)
    ]


_SET_COLUMNS = [
    Column(("terms", ""), "terms", numbers.whole),
    Column(("bound", "x output"), "bound", numbers.plain),
    Column(("held", "x output"), "held", numbers.plain),
    Column(("measured", "x output"), "measured", numbers.plain),
    Column(("measured", "/ bound"), "ratio", numbers.plain),
    Column(("exceeded", "prompts"), "exceeded", numbers.whole),
    Column(("sum of", "norms"), "triangle", numbers.plain),
]
_PART_COLUMNS = [
    Column((name, field, "x output"), f"{kind}.{field}", numbers.plain)
    for kind, name in (("block", "block"), ("attention", "attention"), ("ffn", "FFN"))
    for field in ("bound", "measured")
]
TABLES = {"eq16[].": _SET_COLUMNS}

"""Tables on what each attention head reads, compared with uniform attention: --heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, Column, on_page, titled_named, value_at
from duat_cli.report.tables.page import BLANK, Page, heading, note
from duat_cli.results.base import Result
from duat_cli.results.heads import Attended, HeadAttended, Heads
from duat_cli.results.inspect import Block, InspectReport
from duat_cli.text import indices, plural

COLUMNS = [
    Column(("context", "tokens"), "effective_context", numbers.plain),
    Column(("entropy", "bits"), "entropy_bits", numbers.plain),
    Column(("distance", "tokens"), "mean_distance", numbers.plain, ("mean distance", "tokens")),
    Column(("first", "token", "%"), "first_token_share", numbers.percent),
    Column(("current", "token", "%"), "current_token_share", numbers.percent),
    Column(("previous", "token", "%"), "previous_token_share", numbers.percent),
    Column(("dupl.", "token", "%"), "duplicate_token_share", numbers.percent, ("duplicate token", "%")),
    Column(("induc\N{SOFT HYPHEN}", "tion", "%"), "induction_share", numbers.percent),
]
_SHARES = {column.path: column.name for column in reversed(on_page(COLUMNS)) if column.path.endswith("_share")}
_ALL = 24  # up to so many heads, all are shown; of more, only the leading ones
_LEADING = 4  # how many heads lead by each share
_ONE = 1e-2  # rounding of a row's sum in half precision
_NAMED, _FAR = 3, 0.25  # how many heads are named for each share, and how far above the null they have to be


@dataclass(frozen=True)
class _Head:
    name: str
    row: HeadAttended
    null: Attended

    def above(self, path: str) -> float | None:
        """The share minus that of uniform attention."""
        value, null = value_at(self.row, path), value_at(self.null, path)
        return None if value is None or null is None else value - null


def head_tables(report: InspectReport, page: Page) -> list[RenderableType]:
    """The heads that are farthest above uniform attention, or all if they are few; and sentences on those far above."""
    blocks = [(block, block.heads) for block in report.blocks if block.heads is not None]
    if not blocks:
        return []
    every = [
        _Head(f"{block.index}.{row.index}", row, found.uniform)
        for block, found in blocks
        for row in found.each or ()
        if found.uniform is not None
    ]
    absent = facts.without_value(
        [block for block, _ in blocks], BLOCK, [Column(c.title, f"heads.uniform.{c.path}", c.form) for c in COLUMNS]
    )
    if not every:
        return [BLANK, heading("What each head reads"), *absent]
    shown, nulls = _shown(every), _nulls(blocks)
    numbered = ["null"] if len(nulls) == 1 else [f"null {number}" for number in range(1, len(nulls) + 1)]
    rows: list[tuple[str, Result]] = [(head.name, head.row) for head in shown]
    rows += [(name, null) for name, (null, _) in zip(numbered, nulls, strict=True)]
    where = [f"{name}: {indices('block', at)}" for name, (_, at) in zip(numbered, nulls, strict=True)]
    zero = [f"{head.name}: {why}" for head in shown if (why := head.row.reasons.get("entropy_bits"))]
    leading = f"{len(shown)} of {len(every)} heads: by each share the {_LEADING} farthest above the null"
    title = "What each head (block.head) reads; null: H uniform over the tokens that a row may see"
    return [
        *titled_named(title, rows, COLUMNS, page, head="head"),
        BLANK,
        *([note(f"{leading}; the others are in the JSON.")] if len(shown) < len(every) else []),
        note(_legend([found for _, found in blocks])),
        *([note(f"{'; '.join(where)}. What rows may see differs between them.")] if len(nulls) > 1 else []),
        *facts.section("far above uniform attention", _far(every) if report.certificate.exact else []),
        *absent,
        *facts.section("heads without numbers", zero),
    ]


def _shown(every: Sequence[_Head]) -> list[_Head]:
    if len(every) <= _ALL:
        return list(every)
    leading = {head.name for path in _SHARES for head in _by(every, path)[:_LEADING]}
    return [head for head in every if head.name in leading]


def _by(every: Sequence[_Head], path: str) -> list[_Head]:
    """Heads by how far a share is above uniform attention, the farthest first; without those that are not above."""
    known = [(above, head) for head in every if (above := head.above(path)) is not None and above > 0]
    return [head for _, head in sorted(known, key=lambda pair: -pair[0])]


def _nulls(blocks: Sequence[tuple[Block, Heads]]) -> list[tuple[Attended, list[int]]]:
    """Each distinct null with its blocks; there is one if rows of all blocks may see the same tokens."""
    found: list[tuple[Attended, list[int]]] = []
    for block, heads in blocks:
        if heads.uniform is None:
            continue
        at = next((at for null, at in found if null == heads.uniform), None)
        if at is None:
            found.append((heads.uniform, [block.index]))
        else:
            at.append(block.index)
    return found


def _legend(found: Sequence[Heads]) -> str:
    equal, behind = _most([h.duplicate_rows for h in found]), _most([h.induction_rows for h in found])
    return (
        f"Means over rows of H. first, current, previous: without row 0. dupl.: equal tokens in front, over {equal} "
        f"with one. induction: tokens behind another occurrence of the row's own, over {behind}.{_sums(found)}"
    )


def _most(counts: Sequence[int | None]) -> str:
    most = max(count or 0 for count in counts)
    return plural(most, "row") if most else "no rows"


def _sums(found: Sequence[Heads]) -> str:
    """A sentence on the sums of rows of H, if they are not 1."""
    sums = [head.row_sum for heads in found for head in heads.each or ()]
    if all(abs(value - 1) < _ONE for value in sums):
        return ""
    least, most = numbers.plain(min(sums)), numbers.plain(max(sums))
    return f" Rows of H sum to {least} to {most}: shares are of the sizes of a row's entries."


def _far(every: Sequence[_Head]) -> list[str]:
    texts = []
    for path, name in _SHARES.items():
        leading = [head for head in _by(every, path)[:_NAMED] if (head.above(path) or 0.0) >= _FAR]
        said = (
            f"{head.name} {numbers.percent(value_at(head.row, path))} % "
            f"(uniform {numbers.percent(value_at(head.null, path))} %)"
            for head in leading
        )
        texts += [f"{name}: {', '.join(said)}"] if leading else []
    return texts

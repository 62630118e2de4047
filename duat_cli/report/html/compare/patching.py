"""Figures on what moves the prediction: effects of blocks as lines, effects of heads and tokens as a map."""

from __future__ import annotations

from markupsafe import Markup

from duat_cli.report.html.drawing.blocks import (
    Parts,
    across,
    lines,
    map_of_heads,
    meanings,
    table_of_blocks,
    table_of_heads,
)
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import on_page, value_at
from duat_cli.report.tables.patching import EFFECT_COLUMNS, WHAT, WORDS, check, columns_of, predictions
from duat_cli.results.compare.patching import Patching
from duat_cli.results.compare.report import CompareReport

_EFFECTS = on_page(EFFECT_COLUMNS)
_SERIES = ("s1", "s2", "s3", "s4", "s5")
_SAYS = (
    "The share of the difference in logits that the part makes: at 0 the prediction is a's, at 100 % it is b's; what "
    "follows the part runs for real. Effects need not add up. Null: the same with the part of a third prompt."
)


def patches(report: CompareReport) -> Figure | None:
    found = report.patched
    if found is None:
        return None
    picture, table = _blocks(found) if found.what == "blocks" else _map(found)
    path = "patched.blocks[]" if found.what == "blocks" else f"patched.blocks[].{found.what}[]"
    names = ("together.effect", "together.null", "together.kl") if found.what == "blocks" else ("effect", "null", "kl")
    said = check(found)
    return Figure(
        key="patched",
        title=f"What moves the prediction: a's pass, in which {WHAT[found.what]}",
        says=_SAYS,
        picture=picture,
        tables=table,
        terms=[*(f"{path}.{name}" for name in names), "patched.pairs[].before", "patched.own_error"],
        legend=meanings("line", _drawn(found)) if found.what == "blocks" else [],
        notes=[
            *(f"{text}." for text in predictions(found)),
            f"Holds: {said}." if found.holds else f"DOES NOT HOLD: {said}.",
        ],
    )


def _blocks(found: Patching) -> tuple[Markup, list[Table]]:
    parts = _drawn(found)
    every = [value for block in found.blocks for path, _, _ in parts if (value := value_at(block, path)) is not None]
    plot = Plot(across(found.blocks), Axis("share of the difference in logits (%)", Linear.over(every, percent=True)))
    about = "Lines over blocks: attention weights, norms, FFN, all together, and the null of each."
    columns = on_page(columns_of(found))
    tables = [table_of_blocks(found.blocks, columns, "patched.blocks[]")]
    if found.whole is not None:
        tables.append(
            table_of([found.whole], Head("blocks", number=False), lambda _: "all at once", columns, "patched.whole")
        )
    return plot.svg(lines(plot, found.blocks, parts, numbers.share), about), tables


def _drawn(found: Patching) -> Parts:
    """The parts with a number in any block; with a single pair there are no nulls."""
    columns = on_page(columns_of(found))
    parts = [(c.path, _SERIES[place % (len(columns) // 2)], c.name) for place, c in enumerate(columns)]
    return [part for part in parts if any(value_at(block, part[0]) is not None for block in found.blocks)]


def _map(found: Patching) -> tuple[Markup, list[Table]]:
    """A map of effects, with heads or tokens across and blocks upwards, and its table."""
    word = WORDS[found.what]
    known = [(place, block, block.heads or block.tokens) for place, block in enumerate(found.blocks)]
    known = [one for one in known if one[2]]
    largest = max((abs(v) for _, _, row in known for one in row if (v := one.effect) is not None), default=0.0)
    picture = map_of_heads(known, _EFFECTS[0], largest, word=word, signed=True)
    return picture, [table_of_heads(known, _EFFECTS, f"patched.blocks[].{found.what}[]", word=word)]

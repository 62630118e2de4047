"""Maps of signed numbers: hue and a dash show the sign, depth of colour the size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from duat_cli.report.html.drawing.elements import short, tag
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band
from duat_cli.report.tables import numbers

Rows = Sequence[Sequence[float | None]]
STEPS = (0.03, 0.08, 0.2, 0.5)  # shares of the largest number at which a depth of colour begins
_NAMED = 300  # most cells of a map that show their value on hover, those with the largest
_ROOM = (38, 16)  # width and height in pixels that a cell needs for a number
_MINUS = "\N{MINUS SIGN}"
_ROWS = 40  # most kinds of parameters, those with the largest numbers
_LONGEST = 34  # most characters of a kind


def depth(value: float, largest: float) -> str:
    """The CSS class of a number: p1 to p4 above zero, n1 to n4 below, z for less than 3 % of the largest."""
    size = sum(abs(value) >= step * largest for step in STEPS) if largest > 0 else 0
    return f"{'p' if value > 0 else 'n'}{size}" if size else "z"


def cell_map(
    plot: Plot,
    rows: Rows,
    said: Callable[[int, int], str],
    about: str,
    form: Callable[[float | None], str] | None = None,
    *,
    largest: float | None = None,
    signed: bool = True,
    percent: bool = False,
) -> Markup:
    """A picture of cells with the scale of colours below it. about: as for `Plot.svg`; said, form: as for `cells`.
    largest: value of the deepest colour, if several maps share a scale; None: the largest here. signed: whether there
    may be numbers below zero. percent: whether numbers are shares, with the scale in per cent."""
    if largest is None:
        largest = max((abs(v) for row in rows for v in row if v is not None), default=0.0)
    picture = plot.svg(cells(plot, rows, said, form, largest), about)
    return picture + _scale(100 * largest if percent else largest, signed=signed)


def cells(
    plot: Plot, rows: Rows, said: Callable[[int, int], str], form: Callable[[float | None], str] | None, largest: float
) -> list[Mark]:
    """A cell for every number; rows[r][c] is at place r upwards and c across. said: names a cell. form: formats the
    numbers printed into cells that are large enough. largest: value of the deepest colour.

    Cells below zero without a printed number have a dash. Cells below 3 % of the largest have no colour; with a printed
    number they hide the grid behind it.
    """
    known = {(r, c): v for r, row in enumerate(rows) for c, v in enumerate(row) if v is not None}
    width, height = abs(plot.x(1) - plot.x(0)), abs(plot.y(1) - plot.y(0))
    printed = form if width >= _ROOM[0] and height >= _ROOM[1] else None
    filled = (place for place, v in known.items() if printed is not None or depth(v, largest) != "z")
    order = sorted(filled, key=lambda place: -abs(known[place]))
    drawn: list[Mark] = []
    rest: dict[str, list[str]] = {}
    dashes = []
    for number, (r, c) in enumerate(order):
        value = known[r, c]
        left, top, name = plot.x(c) - width / 2, plot.y(r) - height / 2, f"cell {depth(value, largest)}"
        path = f"M{short(left)} {short(top)}h{short(width)}v{short(height)}h{short(-width)}z"
        if number < _NAMED:
            title = tag("title", f"{said(r, c)}: {(form or numbers.SIGNED)(value)}")
            drawn.append(Mark(name, tag("path", title, d=path)))
        else:
            rest.setdefault(name, []).append(path)
        if value < 0 and printed is None:
            dashes.append(f"M{short(left + width / 4)} {short(plot.y(r))}h{short(width / 2)}")
    drawn.sort(key=lambda mark: mark.style)
    drawn += [Mark(name, tag("path", d="".join(paths))) for name, paths in rest.items()]
    if printed is not None:
        places = ((plot.x(c), plot.y(r) + 4, printed(v)) for (r, c), v in known.items())
        drawn += [Mark("inside", tag("text", text, x=x, y=y)) for x, y, text in places]
    return [*drawn, *([Mark("dash", tag("path", d="".join(dashes)))] if dashes else [])]


def _scale(largest: float, *, signed: bool = True) -> Markup:
    count = len(STEPS)
    below = [f"n{k}" for k in range(count, 0, -1)] if signed else []
    steps = [*below, "z", *(f"p{k}" for k in range(1, count + 1))]
    signs = {"n": _MINUS, "p": "+", "z": "0"}
    keys = [tag("span", signs[name[0]], class_=f"key {name}") for name in steps]
    begin = ", ".join(f"{100 * step:g}" for step in STEPS)
    ends = f" from {begin} % of the largest, {numbers.plain(largest)}"
    return tag("p", *keys, ends, class_="depths")


def layer_map(
    values: Mapping[tuple[str, int | None], float],
    what: str,
    *,
    signed: bool = False,
    form: Callable[[float | None], str] = numbers.plain,
) -> tuple[Markup, int]:
    """A map with a cell for each (kind, layer), with None for parameters outside of layers; and how many kinds had no
    room. what: name of the number."""
    most: dict[str, float] = {}
    for (name, _), value in values.items():
        most[name] = max(most.get(name, 0.0), abs(value))
    names = sorted(sorted(most, key=lambda name: -most[name])[:_ROWS], reverse=True)
    numbered = [layer for _, layer in values if layer is not None]
    across: list[int | None] = [*([None] if any(layer is None for _, layer in values) else [])]
    across += range(max(numbered) + 1 if numbered else 0)
    labels = ["none" if layer is None else str(layer) for layer in across]
    shown = [name if len(name) <= _LONGEST else f"..{name[2 - _LONGEST :]}" for name in names]
    plot = Plot(
        Axis("block", Band(labels)),
        Axis("", Band(shown, most=_ROWS)),
        height=80 + 22 * len(names),
        longest=max(map(len, shown), default=0),
    )
    rows = [[values.get((name, layer)) for layer in across] for name in names]
    about = f"Map of {what}: blocks across, kinds of parameters upwards."
    picture = cell_map(plot, rows, lambda r, c: f"{names[r]}, block {labels[c]}, {what}", about, form, signed=signed)
    return picture, len(most) - len(names)


def place_of(name: str) -> tuple[str, int | None]:
    """Kind of a parameter and number of its layer, such as ('mlp.up_proj.weight', 3)."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return (name, None) if found is None else (name[found.end() :], int(found[1]))


def words(tokens: Sequence[tuple[str, float, str]]) -> Markup:
    """Running text of tokens, given as (token, number, text on hover), with the scale of colours below it. Tokens are
    marked by hue, depth and sign, unless their number is below 3 % of the largest."""
    largest = max((abs(value) for _, value, _ in tokens), default=0.0)
    found: list[Markup] = []
    for name, run in itertools.groupby(tokens, lambda token: depth(token[1], largest)):
        if name == "z":
            found.append(tag("bdi", *(text for text, _, _ in run)))
        else:
            found += [_word(text, value, said, name) for text, value, said in run]
    return tag("p", *found, class_="text") + _scale(largest)


def _word(text: str, value: float, said: str, name: str) -> Markup:
    sign = tag("sup", "+" if value > 0 else _MINUS)
    return tag("span", tag("bdi", text), sign, class_=f"word {name}", title=said)

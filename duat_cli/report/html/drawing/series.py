"""Marks of whole lists: a curve over places, a bar that is stacked of parts, a line across to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.marks import Mark
from duat_cli.report.html.drawing.plot import Plot

_GAP = 0.14  # of a band, on either side of its bar


def curve(
    plot: Plot,
    values: Sequence[float | None],
    series: str,
    places: Sequence[str],
    name: str,
    form: Callable[[float], str],
    *,
    hollow: bool = False,
    size: float = 4.0,
) -> list[Mark]:
    """A line with a mark at every value; places without one are left out. Marks say 'block 3, routing: 12 %': which of
    the places it is, the curve's name, and the value as `form` has it."""
    points = [(k, v, f"{places[k]}, {name}: {form(v)}") for k, v in enumerate(values) if v is not None]
    return dotted(plot, points, series, hollow=hollow, size=size)


def dotted(
    plot: Plot, points: Sequence[tuple[float, float, str]], series: str, *, hollow: bool = False, size: float = 4.0
) -> list[Mark]:
    """A line through points with a mark at each: (across, up, what it says on hover)."""
    places = [(plot.x(x), plot.y(y)) for x, y, _ in points]
    dots = [
        marks.dot(*place, series, said, hollow=hollow, size=size)
        for place, (_, _, said) in zip(places, points, strict=True)
    ]
    return [marks.line(places, series), *dots]


def stack(plot: Plot, place: int, parts: Iterable[tuple[float | None, str, str]]) -> list[Mark]:
    """A bar of parts on each other: (value, series, what it says on hover). Values above zero go up from there, those
    below it down; parts without a value are left out."""
    left, right = plot.x(place - 0.5 + _GAP), plot.x(place + 0.5 - _GAP)
    ends = {True: 0.0, False: 0.0}
    found = []
    for value, series, said in parts:
        if value is None:
            continue
        start = ends[value >= 0]
        end = ends[value >= 0] = start + value
        top, bottom = sorted((plot.y(start), plot.y(end)))
        found.append(marks.bar(left, top, right - left, bottom - top, series, said))
    return found


def level(plot: Plot, value: float, said: str | None = None) -> Mark:
    """A dashed line across the plot at one value."""
    return marks.rule(plot.left, plot.y(value), plot.right, plot.y(value), said)

"""Marks of whole lists: a curve over places, a bar that is stacked of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.plot import Plot

_GAP = 0.14  # of a band, on either side of its bar


def curve(
    plot: Plot,
    values: Sequence[float | None],
    series: str,
    said: Callable[[int, float], str],
    *,
    hollow: bool = False,
) -> list[Markup]:
    """A line with a mark at every value; places without one are left out. said: what a mark is, by place and value."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    points = [(plot.x(place), plot.y(value)) for place, value in known]
    dots = [marks.dot(x, y, series, said(*one), hollow=hollow) for (x, y), one in zip(points, known, strict=True)]
    return [marks.line(points, series), *dots]


def stack(plot: Plot, place: int, parts: Iterable[tuple[float | None, str, str]]) -> list[Markup]:
    """A bar of parts on each other, from zero up: (value, series, what it says on hover). Parts without a value are
    left out; values are not below zero."""
    left, right = plot.x(place - 0.5 + _GAP), plot.x(place + 0.5 - _GAP)
    height = 0.0
    found = []
    for value, series, said in parts:
        if value is None:
            continue
        top = plot.y(height + value)
        found.append(marks.bar(left, top, right - left, plot.y(height) - top, series, said))
        height += value
    return found

"""A plot: two axes with names and units, a grid, and marks for whole lists of values, such as a curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.elements import short, tag
from duat_cli.report.html.drawing.marks import Mark, drawn, sample
from duat_cli.report.html.drawing.scales import Scale

_NARROW = 560  # width in pixels up to which two plots go beside each other
_LABEL = 6.6  # width in pixels of a label's character
_CHARACTER, _SPACE = 8.0, 6.0  # pixels: widest character, in wide fonts, and space between labels side by side
_GAP = 0.14  # share of a band that is free on either side of its bar

Sample = tuple[str, str, str]
"""An entry of a legend: kind of mark as for `marks.sample`, series, and meaning."""


@dataclass(frozen=True)
class Axis:
    """An axis. title: its name and unit, such as 'effective heads (of 6)'."""

    title: str
    scale: Scale


@dataclass(frozen=True)
class Plot:
    """The geometry of a plot. `x` and `y` give the pixels at which marks (marks.py) are drawn."""

    across: Axis
    up: Axis
    width: float = 880
    height: float = 270
    """Height of the whole picture, in pixels."""
    longest: int = 5
    """Characters of the longest label beside the upright axis."""

    @property
    def left(self) -> float:
        return 34 + self.longest * _LABEL

    @property
    def right(self) -> float:
        return self.width - 22

    @property
    def top(self) -> float:
        return 12.0

    @property
    def bottom(self) -> float:
        return self.height - 46

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.across.scale(value)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.up.scale(value)

    def svg(self, marks: Iterable[Mark], about: str) -> Markup:
        """The picture. about: one sentence for those who cannot see it; the numbers are in the figure's table."""
        grid = [*self._across(), *self._up()]
        return tag(
            "svg",
            tag("g", *grid, class_="axis"),
            drawn(marks),
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            width=self.width,
            height=self.height,
            class_="broad" if self.width > _NARROW else "narrow",
            role="img",
            aria_label=about,
        )

    def _across(self) -> list[Markup]:
        ticks = [(short(self.x(value)), label) for value, label in self._apart(self.across.scale.ticks())]
        bottom = short(self.bottom)
        base = f"M{short(self.left)} {bottom}H{short(self.right)}"
        middle = (self.left + self.right) / 2
        return [
            tag("path", d=base + "".join(f"M{x} {bottom}v4" for x, _ in ticks), class_="base"),
            tag(
                "g",
                *(tag("text", label, x=x) for x, label in ticks),
                tag("text", self.across.title, x=middle, y=21, class_="name"),
                transform=f"translate(0 {short(self.bottom + 17)})",
                class_="across",
            ),
        ]

    def _apart(self, ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
        """The ticks, thinned to every second, third and so on if labels below the axis would touch each other."""
        if len(ticks) < 2:
            return ticks
        needed = _CHARACTER * max(len(label) for _, label in ticks) + _SPACE
        return ticks[:: max(1, math.ceil(needed / abs(self.x(ticks[1][0]) - self.x(ticks[0][0]))))]

    def _up(self) -> list[Markup]:
        ticks = [(short(self.y(value)), label) for value, label in self.up.scale.ticks()]
        left, right = short(self.left), short(self.right)
        turned = f"translate(13 {(self.top + self.bottom) / 2:.0f}) rotate(-90)"
        return [
            tag("path", d="".join(f"M{left} {y}H{right}" for y, _ in ticks), class_="grid"),
            tag(
                "g",
                *(tag("text", label, y=y) for y, label in ticks),
                transform=f"translate({short(self.left - 6)} 4)",
                class_="up",
            ),
            tag("text", self.up.title, transform=turned, class_="name turned"),
        ]


def legend(samples: Iterable[Sample]) -> Markup:
    """A list of marks, each 18 x 12 pixels, followed by their names."""
    items = []
    for kind, series, name in samples:
        mark = tag("svg", sample(kind, series), width=18, height=12, viewBox="0 0 18 12", aria_hidden="true")
        items.append(tag("li", mark, " ", name))
    return tag("ul", *items, class_="legend") if items else Markup("")


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
    """A line with a mark at every value; places without a value are left out. The text of a mark, such as 'block 3,
    routing: 12 %', has the place, the curve's name, and the value formatted by `form`."""
    points = [(k, v, f"{places[k]}, {name}: {form(v)}") for k, v in enumerate(values) if v is not None]
    return dotted(plot, points, series, hollow=hollow, size=size)


def dotted(
    plot: Plot, points: Sequence[tuple[float, float, str]], series: str, *, hollow: bool = False, size: float = 4.0
) -> list[Mark]:
    """A line through points with a mark at each; points are (across, up, text on hover)."""
    places = [(plot.x(x), plot.y(y)) for x, y, _ in points]
    dots = [
        marks.dot(*place, series, said, hollow=hollow, size=size)
        for place, (_, _, said) in zip(places, points, strict=True)
    ]
    return [marks.line(places, series), *dots]


def stack(plot: Plot, place: int, parts: Iterable[tuple[float | None, str, str]]) -> list[Mark]:
    """A stacked bar of parts, given as (value, series, text on hover). Positive values are stacked upwards from zero,
    negative ones downwards; parts without a value are left out."""
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


def diagonal(plot: Plot, said: str) -> Mark:
    """A dashed line from corner to corner, where both values are the same if the axes have the same scale."""
    return marks.rule(plot.left, plot.bottom, plot.right, plot.top, said)

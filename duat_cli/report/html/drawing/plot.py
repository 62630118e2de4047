"""A plot: two axes with names and units, a grid, and marks on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from duat_cli.report.html.drawing.elements import joined, shown, tag
from duat_cli.report.html.drawing.scales import Scale

_NARROW = 560  # pixels up to which two plots stand beside each other
_LABEL = 6.6  # pixels that a character of a label takes


@dataclass(frozen=True)
class Axis:
    """title: its name and unit, such as 'effective heads (of 6)'."""

    title: str
    scale: Scale


@dataclass(frozen=True)
class Plot:
    """The places of a plot. Marks are drawn by marks.py at the places that `x` and `y` give, in pixels."""

    across: Axis
    up: Axis
    width: float = 880
    height: float = 270
    """Of the whole picture, in pixels."""
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

    def svg(self, marks: Sequence[Markup], about: str) -> Markup:
        """The picture. about: one sentence for those who cannot see it; the numbers stand in the figure's table."""
        grid = [*self._across(), *self._up()]
        return tag(
            "svg",
            tag("g", *grid, class_="axis"),
            tag("g", *marks),
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            width=self.width,
            height=self.height,
            class_="broad" if self.width > _NARROW else "narrow",
            role="img",
            aria_label=about,
        )

    def _across(self) -> list[Markup]:
        found = [tag("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="base")]
        for value, label in self.across.scale.ticks():
            at = self.x(value)
            found.append(tag("line", x1=at, x2=at, y1=self.bottom, y2=self.bottom + 4, class_="base"))
            found.append(tag("text", label, x=at, y=self.bottom + 17, text_anchor="middle"))
        middle = (self.left + self.right) / 2
        return [
            *found,
            tag("text", self.across.title, x=middle, y=self.height - 8, text_anchor="middle", class_="name"),
        ]

    def _up(self) -> list[Markup]:
        found = []
        for value, label in self.up.scale.ticks():
            at = self.y(value)
            found.append(tag("line", x1=self.left, x2=self.right, y1=at, y2=at, class_="grid"))
            found.append(tag("text", label, x=self.left - 6, y=at + 4, text_anchor="end"))
        middle = (self.top + self.bottom) / 2
        turned = f"translate(13 {middle:.0f}) rotate(-90)"
        return [*found, tag("text", self.up.title, transform=turned, text_anchor="middle", class_="name")]


def legend(entries: Sequence[tuple[Markup, str]]) -> Markup:
    """What the marks of a plot mean: (a sample of 16 x 12 pixels, its name)."""
    items = [
        tag("li", tag("svg", sample, width=18, height=12, viewBox="0 0 18 12", aria_hidden="true"), " ", shown(name))
        for sample, name in entries
    ]
    return tag("ul", *items, class_="legend") if items else Markup("")


def picture(*parts: Markup) -> Markup:
    """Plots side by side where there is room, each scrolling by itself where there is not."""
    return joined(parts)

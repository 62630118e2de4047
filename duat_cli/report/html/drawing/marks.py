"""Marks on a plot. Series, named `s1` to `s6`, differ by shape or pattern as well as by colour.

Every mark may have a `title` with its value, which shows on hover.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from duat_cli.report.html.drawing.elements import short, tag

SERIES = ("s1", "s2", "s3", "s4", "s5", "s6")
_SIZE = 4.0


@dataclass(frozen=True)
class Mark:
    """A mark. style: CSS classes of the element."""

    style: str
    element: Markup


def drawn(marks: Iterable[Mark]) -> Markup:
    """Marks drawn over each other; consecutive ones of the same style are put into a group with that style."""
    runs = itertools.groupby(marks, lambda mark: mark.style)
    return Markup("").join(tag("g", *(mark.element for mark in run), class_=style) for style, run in runs)


def _said(text: str | None) -> list[Markup]:
    return [tag("title", text)] if text else []


def bar(x: float, y: float, width: float, height: float, series: str, said: str | None = None) -> Mark:
    """A filled rectangle in the pattern of its series; x and y are its upper left corner."""
    return Mark(f"fill {series}", tag("rect", *_said(said), x=x, y=y, width=width, height=height))


def line(points: Sequence[tuple[float, float]], series: str) -> Mark:
    path = "".join(f"{'L' if i else 'M'}{short(x)} {short(y)}" for i, (x, y) in enumerate(points))
    return Mark(f"line {series}", tag("path", d=path))


def dot(x: float, y: float, series: str, said: str | None = None, *, size: float = _SIZE, hollow: bool = False) -> Mark:
    """A point in the shape of its series. hollow: for values that are only compared with."""
    number = SERIES.index(series)
    shape = {"cx": x, "cy": y, "r": size} if number == 0 else {"d": _shape(x, y, number, size)}
    return Mark(
        f"dot {series} hollow" if hollow else f"dot {series}",
        tag("path" if number else "circle", *_said(said), **shape),
    )


def _shape(x: float, y: float, number: int, r: float) -> str:
    """Path of a series' shape: square, triangle, diamond, cross, plus; the first series has a circle."""
    at = f"M{short(x)} {short(y)}"
    s = short
    if number == 1:
        return f"{at}m{s(-r)} {s(-r)}h{s(2 * r)}v{s(2 * r)}h{s(-2 * r)}z"
    if number == 2:
        return f"{at}m0 {s(-1.2 * r)}l{s(1.2 * r)} {s(2.2 * r)}h{s(-2.4 * r)}z"
    if number == 3:
        return f"{at}m0 {s(-1.3 * r)}l{s(1.3 * r)} {s(1.3 * r)}l{s(-1.3 * r)} {s(1.3 * r)}l{s(-1.3 * r)} {s(-1.3 * r)}z"
    if number == 4:
        return f"{at}m{s(-r)} {s(-r)}l{s(2 * r)} {s(2 * r)}m0 {s(-2 * r)}l{s(-2 * r)} {s(2 * r)}"
    return f"{at}m{s(-r)} 0h{s(2 * r)}m{s(-r)} {s(-r)}v{s(2 * r)}"


def span(x1: float, y1: float, x2: float, y2: float, series: str) -> Mark:
    """An interval, as a line without a point."""
    return Mark(f"span {series}", _straight(x1, y1, x2, y2))


def interval(x1: float, y1: float, x2: float, y2: float, series: str) -> Mark:
    """The interval of an estimate, as a thin line."""
    return Mark(f"interval {series}", _straight(x1, y1, x2, y2))


def rule(x1: float, y1: float, x2: float, y2: float, said: str | None = None) -> Mark:
    """A dashed line to compare with."""
    return Mark("rule", _straight(x1, y1, x2, y2, said))


def _straight(x1: float, y1: float, x2: float, y2: float, said: str | None = None) -> Markup:
    return tag("path", *_said(said), d=f"M{short(x1)} {short(y1)}L{short(x2)} {short(y2)}")


def sample(kind: str, series: str) -> Markup:
    """A mark for a legend: 'bar', 'dot', 'line' (with its dots), 'span' or 'rule'; 'hollow dot', 'hollow line'."""
    point = dot(9, 6, series, hollow=kind.startswith("hollow"))
    return drawn(
        {
            "bar": [bar(1, 1, 16, 10, series)],
            "dot": [point],
            "line": [line([(0, 6), (18, 6)], series), point],
            "rule": [rule(0, 6, 18, 6)],
            "span": [span(0, 6, 18, 6, series)],
        }[kind.removeprefix("hollow ")]
    )

"""What is drawn on a plot. Series differ by shape or pattern as well as by colour; `s1` to `s6` name them.

Every mark may say its value in a `title`, which shows on hover.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from duat_cli.report.html.drawing.elements import short, tag

SERIES = ("s1", "s2", "s3", "s4", "s5", "s6")
_SIZE = 4.0


def _said(text: str | None) -> list[Markup]:
    return [tag("title", text)] if text else []


def bar(x: float, y: float, width: float, height: float, series: str, said: str | None = None) -> Markup:
    """A filled rectangle with its series' pattern; x and y are its upper left corner."""
    return tag("rect", *_said(said), x=x, y=y, width=width, height=height, class_=f"fill {series}")


def line(points: Sequence[tuple[float, float]], series: str) -> Markup:
    """A line through points."""
    return tag("path", d=_path(points), class_=f"line {series}")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{short(x)} {short(y)}" for i, (x, y) in enumerate(points))


def area(low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]], series: str) -> Markup:
    """The band between two lines."""
    return tag("path", d=f"{_path([*low, *reversed(high)])}Z", class_=f"area {series}")


def dot(
    x: float, y: float, series: str, said: str | None = None, *, size: float = _SIZE, hollow: bool = False
) -> Markup:
    """A point in its series' own shape. hollow: of what is only compared with."""
    shape = _shape(x, y, SERIES.index(series), size)
    return tag("path", *_said(said), d=shape, class_=f"dot {series} hollow" if hollow else f"dot {series}")


def _shape(x: float, y: float, number: int, r: float) -> str:
    """Circle, square, triangle, diamond, cross, plus."""
    at = f"M{short(x)} {short(y)}"
    s = short
    if number == 0:
        return f"{at}m{s(-r)} 0a{s(r)} {s(r)} 0 1 0 {s(2 * r)} 0a{s(r)} {s(r)} 0 1 0 {s(-2 * r)} 0z"
    if number == 1:
        return f"{at}m{s(-r)} {s(-r)}h{s(2 * r)}v{s(2 * r)}h{s(-2 * r)}z"
    if number == 2:
        return f"{at}m0 {s(-1.2 * r)}l{s(1.2 * r)} {s(2.2 * r)}h{s(-2.4 * r)}z"
    if number == 3:
        return f"{at}m0 {s(-1.3 * r)}l{s(1.3 * r)} {s(1.3 * r)}l{s(-1.3 * r)} {s(1.3 * r)}l{s(-1.3 * r)} {s(-1.3 * r)}z"
    if number == 4:
        return f"{at}m{s(-r)} {s(-r)}l{s(2 * r)} {s(2 * r)}m0 {s(-2 * r)}l{s(-2 * r)} {s(2 * r)}"
    return f"{at}m{s(-r)} 0h{s(2 * r)}m{s(-r)} {s(-r)}v{s(2 * r)}"


def span(x1: float, y1: float, x2: float, y2: float, series: str) -> Markup:
    """An interval: a line without a point."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"span {series}")


def interval(x1: float, y1: float, x2: float, y2: float, series: str) -> Markup:
    """The ends of an estimate, thin."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"interval {series}")


def rule(x1: float, y1: float, x2: float, y2: float, said: str | None = None) -> Markup:
    """A line to compare with, dashed."""
    return tag("line", *_said(said), x1=x1, y1=y1, x2=x2, y2=y2, class_="rule")


def note(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    """A few words on the plot."""
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_="note")


def sample(kind: str, series: str, *, hollow: bool = False) -> Markup:
    """A mark for a legend: 'bar', 'dot', 'line' (with its dots), 'span' or 'rule'."""
    if kind == "bar":
        return bar(1, 1, 16, 10, series)
    if kind == "rule":
        return rule(0, 6, 18, 6)
    if kind == "span":
        return span(0, 6, 18, 6, series)
    if kind == "line":
        return tag("g", line([(0, 6), (18, 6)], series), dot(9, 6, series, hollow=hollow))
    return dot(9, 6, series, hollow=hollow)

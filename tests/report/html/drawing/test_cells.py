"""Maps of signed numbers: class by size and sign, places by row and column."""

from __future__ import annotations

import re

import pytest

from duat_cli.report.html.drawing.cells import cells, depth, words
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band


@pytest.mark.parametrize(
    ("value", "name"), [(1, "p4"), (-1, "n4"), (0.2, "p3"), (-0.1, "n2"), (0.031, "p1"), (0.029, "z"), (0, "z")]
)
def test_depths(value: float, name: str) -> None:
    assert depth(value, 1.0) == name
    assert depth(value, 0.0) == "z"


def test_cells_stand_where_their_row_and_column_are() -> None:
    plot = Plot(Axis("", Band(["a", "b"])), Axis("", Band(["x", "y", "z"])))
    drawn = cells(plot, [[0.0, 2.0], [0.0, 0.0], [-1.0, 0.0]], lambda r, c: f"{r},{c}", None, 2.0)
    assert [mark.style for mark in drawn] == ["cell n4", "cell p4", "dash"]
    titles = [re.search(r"<title>(\S+: \S+)</title>", mark.element) for mark in drawn[:2]]
    assert [title and title[1] for title in titles] == ["2,0: -1.00", "0,1: +2.00"]
    below, above = ([float(n) for n in re.findall(r"M([\d.]+) ([\d.]+)", mark.element)[0]] for mark in drawn[:2])
    assert above == [pytest.approx(plot.x(0.5), abs=0.06), pytest.approx(plot.y(0.5), abs=0.06)]
    assert below == [pytest.approx(plot.x(-0.5), abs=0.06), pytest.approx(plot.y(2.5), abs=0.06)]


def test_a_large_map_is_drawn_whole() -> None:
    """The cells beyond those with a title are merged by class, none is lost."""
    rows = [[float(1 + (r + c) % 7) for c in range(40)] for r in range(30)]
    plot = Plot(Axis("", Band([""] * 40)), Axis("", Band([""] * 30)))
    marks = cells(plot, rows, lambda r, c: "", None, 7.0)
    assert sum(mark.element.count("<title>") for mark in marks) == 300
    assert sum(len(re.findall(r"M[\d. ]+h", mark.element)) for mark in marks) == 40 * 30


def test_words_are_signed_text() -> None:
    text = words([("<b>", 1.0, "so"), ("x", -0.5, "so"), ("y", 0.0, "so")])
    assert "<b>" not in text
    assert text.count("<sup>") == 2
    assert "+</sup>" in text
    assert "\N{MINUS SIGN}</sup>" in text

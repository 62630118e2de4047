"""Columns: their headers as printed and as named, and the values they show."""

from __future__ import annotations

import pytest

from duat_cli.report.tables import lora, numbers
from duat_cli.report.tables.grid import Column, Labels, grids, on_page, reason_at, value_at
from duat_cli.report.tables.page import Page
from duat_cli.results.base import Result, WithReasons
from duat_cli.results.prune.terms import Estimated


class Two(Result):
    share: float
    rest: float


class Row(WithReasons):
    ratio: Estimated | None


def test_a_word_broken_between_two_lines_is_whole_in_the_name() -> None:
    column = Column(("inter\N{SOFT HYPHEN}", "action", "%"), "interaction", numbers.percent)
    assert column.header == ("inter-", "action", "%")
    assert column.name == "interaction"


def test_a_hyphen_of_its_own_stays() -> None:
    column = Column(("off-", "diag", "share", "%"), "off_diagonal_share", numbers.percent)
    assert column.header == column.title
    assert column.name == "off-diag share"


def test_a_page_has_the_longer_header_where_there_is_one() -> None:
    short = Column(("mean", "share", "%"), "share", numbers.percent)
    both = Column(("dens.", "%"), "rest", numbers.percent, ("density", "of W'"))
    shown = on_page([short, both])
    assert [(column.name, column.title[-1]) for column in shown] == [("mean share", "%"), ("density", "of W'")]
    assert [column.cell(Two(share=0.25, rest=0.5)) for column in shown] == ["25.0", "50.0"]


@pytest.mark.parametrize("columns", [lora.KIND_COLUMNS, lora.COMPARED_KIND_COLUMNS, lora.BLOCK_COLUMNS])
def test_the_unit_of_a_page_is_no_rest_of_a_word(columns: list[Column]) -> None:
    """A page sets the last line of a header apart as the unit."""
    assert [column.name for column in on_page(columns) if column.title[-2].endswith("\N{SOFT HYPHEN}")] == []


def test_an_estimate_is_shown_by_its_value() -> None:
    row = Row(ratio=Estimated(value=0.5, low=0.25, high=0.75))
    assert (value_at(row, "ratio"), value_at(row, "ratio.low")) == (0.5, 0.25)
    none = Row(ratio=None, reasons={"ratio": "too few terms"})
    assert value_at(none, "ratio") is None
    assert reason_at(none, "ratio.low") == reason_at(none, "ratio") == "too few terms"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (16, ["row  share  rest", "0     25.0  75.0"]),
        (15, ["row share rest", "0    25.0 75.0"]),
        (14, ["row share rest", "0    25.0 75.0"]),
        (13, ["row  share", "0     25.0", "row  rest", "0    75.0"]),
    ],
)
def test_columns_stand_closer_before_one_falls_into_a_table_of_its_own(width: int, expected: list[str]) -> None:
    columns = [Column((name,), name, numbers.percent) for name in ("share", "rest")]
    labels, page = Labels(("row",), lambda row: "0", right=False), Page(width, boxes=False)
    text = page.render(*grids([Two(share=0.25, rest=0.75)], labels, columns, page))
    assert [line for line in text.splitlines() if line.strip(" -")] == expected

"""Scales: every value has its place, and ticks are round and inside."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.report.html.drawing.scales import Band, Linear, Log

numbers = st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-9)


@given(st.lists(numbers, min_size=1, max_size=8), st.booleans())
def test_a_linear_axis_holds_its_values_in_order(values: list[float], zero: bool) -> None:
    scale = Linear.over(values, zero=zero)
    places = [scale(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(-1e-3 <= place <= 1 + 1e-3 for place in places)
    ticks = [value for value, _ in scale.ticks()]
    assert 2 <= len(ticks) <= 12
    assert all(-1e-6 <= scale(value) <= 1 + 1e-6 for value in ticks)


def test_rounding_adds_no_tick() -> None:
    assert Linear.over([0.2, 1.0000001], percent=True) == Linear(0.0, 1.0, percent=True)
    assert [label for _, label in Linear.over([0.2, 1.0000001], percent=True).ticks()] == [
        "0",
        "20",
        "40",
        "60",
        "80",
        "100",
    ]


@pytest.mark.parametrize(("values", "labels"), [
    ([0.012], ["0.0000", "0.0025", "0.0050", "0.0075", "0.0100", "0.0125"]),
    ([-0.3, 0.9], ["-0.5", "0.0", "0.5", "1.0"]),
    ([], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ([None, 7.0], ["0", "2", "4", "6", "8"]),
])  # fmt: skip
def test_labels(values: list[float | None], labels: list[str]) -> None:
    found = [label for _, label in Linear.over(values).ticks()]
    assert found[-len(labels) :] == labels


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([-5e-5, 3e-5], ["-6e-5", "-4e-5", "-2e-5", "0", "2e-5", "4e-5"]),
        ([3e-10], ["0", "1e-10", "2e-10", "3e-10"]),
        ([-2e-4, 1e-4], ["-0.0002", "-0.0001", "0.0000", "0.0001"]),
    ],
)
def test_labels_of_small_numbers_are_short(values: list[float], labels: list[str]) -> None:
    assert [label for _, label in Linear.over(values).ticks()] == labels


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=8))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    scale = Log.over([*values, 0.0, None])
    assert all(-1e-6 <= scale(value) <= 1 + 1e-6 for value in values)
    assert scale(math.sqrt(scale.low * scale.high)) == pytest.approx(0.5)
    assert len(scale.ticks()) <= 10


def test_a_band_thins_its_labels_out() -> None:
    scale = Band([str(i) for i in range(80)], most=20)
    assert [label for _, label in scale.ticks()] == [str(i) for i in range(0, 80, 5)]
    assert scale(0) == pytest.approx(0.5 / 80)
    assert scale(79) == pytest.approx(79.5 / 80)
    assert Band([]).ticks() == []
    assert Band(["a", "b"], most=0).ticks() == Band(["a", "b"], most=1).ticks()  # a picture of no height ends as well

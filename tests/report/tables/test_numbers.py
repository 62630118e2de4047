"""Numbers as text."""

from __future__ import annotations

import pytest

from duat_cli.report.tables import numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (4.117, "4.12"),
        (0.4123, "0.412"),
        (999.6, "1000"),
        (12345.6, "12346"),
        (123456.0, "1.2e+05"),
        (1e-9, "1.0e-09"),
        (-3.0, "-3.00"),
        (183.4, "183"),
    ],
)
def test_plain(value: float | None, text: str) -> None:
    assert numbers.plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.0"),
        (-1e-9, "0.0"),
        (0.0002, "<0.1"),
        (-0.0002, ">-0.1"),
        (0.4312, "43.1"),
        (0.99999, ">99.9"),
        (1.0, "100.0"),
        (-0.0312, "-3.1"),
        (1.0208, "102.1"),
    ],
)
def test_percent(value: float | None, text: str) -> None:
    assert numbers.percent(value) == text


def test_other_forms() -> None:
    assert [numbers.error(value) for value in (None, 0.0, 3.14e-7)] == ["-", "0", "3.1e-07"]
    assert [numbers.count(value) for value in (7, 1234, 134_515_008, 7.2e10)] == ["7", "1.23 k", "135 M", "72 G"]
    assert [numbers.size(value) for value in (12, 2048, 8387629056)] == ["12 B", "2 KiB", "7.81 GiB"]
    assert [numbers.size(value * 2**20) for value in (999, 1008, 1023.6)] == ["999 MiB", "1008 MiB", "1024 MiB"]
    assert [numbers.unit_of(value) for value in (0, 1023.9, 1024, 2**40, 2**71)] == ["B", "B", "KiB", "TiB", "EiB"]


def test_fixed() -> None:
    assert [numbers.fixed(3)(value) for value in (None, 0.0, -1.0, 0.99961)] == ["-", "0.000", "-1.000", "1.000"]

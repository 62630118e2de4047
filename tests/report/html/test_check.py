"""The page of `duat check`: how near a measurement is to its bound, as it is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from duat_cli.report.html.check import share
from duat_cli.results.check import Outcome


@pytest.mark.parametrize(
    ("measured", "low", "high", "expected"),
    [
        (10.0, 7.0, 13.0, 1e-3),  # unmoved
        (11.5, 7.0, 13.0, 0.5),
        (8.5, 7.0, 13.0, 0.5),
        (16.0, 7.0, 13.0, 2.0),
        (0.0, -1.0, 2.0, 1 / 3),
        (-3.0, -2.0, 2.0, 1.5),
        (1.0, 1.0, 1.0, None),  # no room at all
        (3.0, None, 4.0, 0.75),
        (3.0, 1.5, None, 0.5),
        (0.0, None, 4.0, None),
        (3.0, None, 0.0, None),
        (3.0, None, None, None),
    ],
)
def test_share(measured: float, low: float | None, high: float | None, expected: float | None) -> None:
    made: dict[str, Any] = {"measured": measured, "low": low, "high": high, "status": "passed"}
    assert share(Outcome.model_construct(**made)) == (None if expected is None else pytest.approx(expected))

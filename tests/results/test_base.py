"""What every result has."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from duat_cli.results.base import WithReasons


class Measured(WithReasons):
    """A result of three fields."""

    rows: int
    size: float | None
    share: float | None


def test_absent_numbers_are_null_each_with_the_reason() -> None:
    found = Measured.absent("no factors", rows=3)
    assert found == Measured(rows=3, size=None, share=None, reasons={"size": "no factors", "share": "no factors"})
    assert list(found.reasons) == ["size", "share"]


def test_a_field_that_cannot_be_null_must_be_known() -> None:
    with pytest.raises(ValidationError, match="rows"):
        Measured.absent("no factors")

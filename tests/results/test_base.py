"""What every result has."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from duat_cli.results.base import Finite, Result, Share, WithReasons


class Sized(Result):
    """A number, alone and in lists."""

    size: Finite
    sizes: list[Finite | None]
    share: Share


def test_zero_has_no_sign() -> None:
    found = Sized(size=-0.0, sizes=[-0.0, None, -1.0], share=-0.0)
    assert found.model_dump_json() == '{"size":0.0,"sizes":[0.0,null,-1.0],"share":0.0}'
    assert "function" not in json.dumps(Sized.model_json_schema())


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

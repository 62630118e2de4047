"""The table by which configs are made tiny."""

from __future__ import annotations

import pydantic
import pytest

from duat_cli.zoo import tiny
from duat_cli.zoo.rule import Rule, TypeException, rule


def test_an_unknown_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pydantic.ValidationError):
        Rule.model_validate(rule().model_dump() | {"field": {}})
    wrong = TypeException(why="a slip", set={"hiden_size": 8})
    broken = rule().model_copy(update={"types": {"llama": wrong}})
    monkeypatch.setattr(tiny, "rule", lambda: broken)
    result = tiny.build("llama")
    assert isinstance(result, tiny.NotBuilt)
    assert "hiden_size" in result.reason

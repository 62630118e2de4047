"""Which field keeps a class from being built: named where leaving it out alone is enough, of real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from refusals import refusal_of_load

from duat_cli.loading.model.blame import blamed


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh'"),
        ({"pad_token_id": 99999}, "pad_token_id 99999"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_parameters.rope_type 'foo'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_parameters.rope_theta 'x'"),
        ({"mlp_bias": True}, "mlp_bias true"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], named: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, **fields)
    assert f"; {named} is why: without it this error is gone" in refusal_of_load(str(sound))


def test_a_field_that_the_error_has_is_not_named_twice(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, rms_norm_eps="small")
    text = refusal_of_load(str(sound))
    assert "rms_norm_eps" in text
    assert "is why" not in text


def test_two_faults_have_no_single_reason() -> None:
    config = {"a": 1, "b": {"c": 2, "d": True}}
    assert blamed(config, "", lambda content: "a" not in content and "c" not in content["b"]) == ""
    assert (
        blamed(config, "", lambda content: content["b"]["d"] is False)
        == "; b.d true is why: without it this error is gone"
    )
    assert blamed(config, "", lambda content: "a" not in content, kind=bool) == ""
    assert config == {"a": 1, "b": {"c": 2, "d": True}}

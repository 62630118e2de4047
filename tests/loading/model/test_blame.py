"""Which field keeps a class from being built, and which contradicts the shapes: of real models, named where it alone is
why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from refusals import refusal_of_load

from duat_cli.loading.model.blame import blamed, fitting_fields


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


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("num_attention_heads", 8, 4),
        ("num_attention_heads", 2, 4),
        ("num_key_value_heads", 1, 2),
        ("num_key_value_heads", 4, 2),
        ("head_dim", 16, 8),
        ("intermediate_size", 60, 64),
        ("vocab_size", 300, bad.VOCAB),
    ],
)
def test_the_field_of_a_shape_is_named(field: str, wrong: int, right: int, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, head_dim=8)
    bad.jedit(sound / bad.CFG, **{field: wrong})
    text = refusal_of_load(str(sound))
    assert "shape mismatch, config.json asks for [" in text
    assert f"{field} {wrong}, which would have to be {right}" in text


def test_a_count_that_the_width_of_a_head_is_derived_from(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, ("head_dim",), num_attention_heads=8)
    assert "num_attention_heads 8, which would have to be 4" in refusal_of_load(str(sound))


@pytest.mark.parametrize("field", ["num_key_value_heads", "vocab_size"])
def test_a_field_that_is_not_stated(field: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, (field,))
    assert f"{field} {4 if field == 'num_key_value_heads' else 32000}, which would have" in refusal_of_load(str(sound))


def test_a_size_of_zero(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, intermediate_size=0)
    assert "intermediate_size 0, which would have to be 64" in refusal_of_load(str(sound))


def test_the_width(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, ("head_dim",), hidden_size=64)
    text = refusal_of_load(str(sound))
    assert "[264, 64]" in text
    assert "hidden_size 64, which would have to be 32" in text


def test_two_wrong_fields_have_no_single_explanation(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, head_dim=8, intermediate_size=60, vocab_size=300)
    assert "the config is of another checkpoint" in refusal_of_load(str(sound))


def test_few_rehearsals_and_no_huge_ones() -> None:
    tried = []

    def fits(config: dict[str, object]) -> bool:
        tried.append(config)
        return False

    config = {f"f{n}": n + 2 for n in range(100)} | {"text_config": {"n": 7}, "bos_token_id": 5, "flag": True}
    assert fitting_fields(config, {}, {"w": ((6, 4), (3, 4))}, fits) == []
    assert 0 < len(tried) <= 24
    assert all(config.get("bos_token_id") == 5 and config.get("flag") is True for config in tried)
    assert fitting_fields({"a": 3}, {}, {"w": ((10**9,), (3,))}, lambda c: c["a"] == 10**9) == [("a", 3, 10**9)]

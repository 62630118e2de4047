"""Fields of the configs: what counts as one, and what cannot change a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.declared.fields import flat, generation, resolved, why_ignored


def test_paths_lists_and_nulls() -> None:
    content = {"rope_parameters": {"rope_theta": 1e4}, "layer_types": ["a", "b"], "pad_token_id": None, "n": 0}
    assert flat(content) == {"rope_parameters.rope_theta": 1e4, "layer_types": ["a", "b"], "n": 0}


def test_what_json_has_no_number_for_is_a_text() -> None:
    infinite = json.loads('{"time_step_limit": [0.0, Infinity], "a": -Infinity}')
    assert flat(infinite) == {"time_step_limit": [0.0, "inf"], "a": "-inf"}


@pytest.mark.parametrize(
    "name",
    ["transformers_version", "dtype", "text_config.torch_dtype", "use_cache", "attention_dropout", "output_attentions"],
)
def test_what_cannot_change_a_result_has_a_reason(name: str) -> None:
    assert why_ignored(name)
    assert flat({name: 1}) == {}


@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "hidden_act", "tie_word_embeddings", "sliding_window", "architectures", "bos_token_id"]
)
def test_what_can_is_kept(name: str) -> None:
    assert why_ignored(name) is None


def test_no_ignored_field_moves_the_logits_of_a_model() -> None:
    """Every field of a real config, changed where it is ignored: the output stays the same to the bit."""
    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        plain = model(ids).logits
        changes = {"use_cache": False, "initializer_range": 0.9, "attention_dropout": 0.9, "pretraining_tp": 2}
        assert all(why_ignored(name) for name in changes)
        other = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, **changes)).eval()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(ids).logits, plain)
        theta = {"rope_theta": 2.0, "rope_type": "default"}
        moved = LlamaForCausalLM(
            LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, rope_parameters=theta)
        )
        moved.load_state_dict(model.state_dict())
        assert not torch.equal(moved.eval()(ids).logits, plain)  # the comparison can fail


def test_defaults_are_resolved_and_stay_the_same_when_they_are_written_out(tmp_path: Path) -> None:
    content = json.loads((demo_path() / "config.json").read_text())
    del content["rms_norm_eps"], content["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    short = AutoConfig.from_pretrained(tmp_path)
    assert resolved(short)["rms_norm_eps"] == LlamaConfig().rms_norm_eps
    assert resolved(short)["attention_bias"] is False
    (tmp_path / "config.json").write_text(json.dumps(short.to_dict(), sort_keys=True, default=str))
    assert resolved(AutoConfig.from_pretrained(tmp_path)) == resolved(short)


def test_generation_config(tmp_path: Path) -> None:
    assert generation(tmp_path) == {}
    assert flat(generation(demo_path())) == {"bos_token_id": 0, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not JSON"):
        generation(tmp_path)

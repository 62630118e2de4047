"""Where a tensor stands, by its name; widths, by the config."""

from __future__ import annotations

import pytest

from duat_cli.checks.places import block_of, depth, head_width, is_attention


@pytest.mark.parametrize(
    ("name", "stack", "index", "rest"),
    [
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers", 3, "mlp.experts.7.w1.weight"),
        ("encoder.block.0.layer.1.x", "encoder.block", 0, "layer.1.x"),
        ("h.11.attn.c_attn.weight", "h", 11, "attn.c_attn.weight"),
        ("0.weight", "", 0, "weight"),
    ],
)
def test_places(name: str, stack: str, index: int, rest: str) -> None:
    found = block_of(name)
    assert found is not None
    assert (found[0].stack, found[0].index, found[1]) == (stack, index, rest)


def test_names_and_configs() -> None:
    assert block_of("lm_head.weight") is None
    assert block_of("model.layer12.weight") is None
    assert is_attention("h.0.attn.c_attn.weight")
    assert is_attention("encoder.layer.0.attention.self.query.weight")
    assert not is_attention("model.layers.0.mlp.up_proj.weight")
    assert head_width({"hidden_size": 32, "num_attention_heads": 4}) == 8
    assert head_width({"text_config": {"head_dim": 7}}) == 7
    assert head_width({"hidden_size": 33, "num_attention_heads": 4}) is None
    assert head_width({"hidden_size": "32", "num_attention_heads": 0}) is None
    assert depth({"num_hidden_layers": True}) is None

"""Where a tensor stands, by its name; widths, by the config."""

from __future__ import annotations

from typing import Any

import pytest

from duat_cli.checks.places import Heads, block_of, depth, head_width, heads_of, is_attention, role_of


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


PLAIN = {"hidden_size": 32, "num_attention_heads": 4}
LATENT = {**PLAIN, "head_dim": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
LINEAR = {
    **PLAIN,
    "linear_key_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 6,
    "linear_num_value_heads": 8,
}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("layers.0.self_attn.q_proj.weight", PLAIN, Heads(True, 8, True, 4)),
        ("layers.0.self_attn.k_proj.weight", PLAIN, Heads(True, 8, True)),
        ("encoder.layer.0.attention.self.value.weight", PLAIN, Heads(True, 8, True)),
        ("encoder.layer.0.attention.output.dense.weight", PLAIN, Heads(False, 8, True, 4)),
        ("block.0.layer.0.SelfAttention.k.weight", PLAIN, Heads(True, 8, True)),
        ("h.0.attn.c_attn.weight", PLAIN, Heads(True, 8, False)),
        ("layers.0.self_attn.in_proj_weight", PLAIN, Heads(True, 8, False)),
        ("layers.0.attention.wqkv.weight", PLAIN, Heads(True, 8, False)),
        ("block.0.layer.0.SelfAttention.q.weight", {**PLAIN, "d_kv": 16}, Heads(True, 16, True, 4)),
        ("blocks.0.attn.to_out.0.weight", PLAIN, Heads(False, 8, True, 4)),
        ("layers.0.linear_attn.q_proj.weight", LINEAR, Heads(True, 5, True, 2)),
        ("layers.0.linear_attn.v_proj.weight", LINEAR, Heads(True, 6, True, 8)),
        ("layers.0.linear_attn.out_proj.weight", LINEAR, Heads(False, 6, True, 8)),
        ("layers.0.linear_attn.in_proj.weight", LINEAR, None),
        ("layers.0.linear_attn.out_proj.weight", PLAIN, None),
        ("layers.0.self_attn.q_b_proj.weight", LATENT, Heads(True, 10, True, 4)),
        ("layers.0.self_attn.kv_b_proj.weight", LATENT, Heads(True, 13, True)),
        ("layers.0.self_attn.o_proj.weight", LATENT, Heads(False, 7, True, 4)),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", LATENT, None),
        ("layers.0.self_attn.kv_b_proj.weight", PLAIN, None),
        ("layers.0.self_attn.q_proj.weight", {}, None),
        ("layers.0.self_attn.indexer.weights_proj.weight", PLAIN, None),
    ],
)
def test_heads_lie_along_the_side_that_the_layer_s_name_says(
    name: str, config: dict[str, Any], expected: Heads | None
) -> None:
    assert heads_of(name, config) == expected


def test_names_and_configs() -> None:
    assert block_of("lm_head.weight") is None
    assert block_of("model.layer12.weight") is None
    assert is_attention("h.0.attn.c_attn.weight")
    assert is_attention("encoder.layer.0.attention.self.query.weight")
    assert not is_attention("model.layers.0.mlp.up_proj.weight")
    assert head_width({"hidden_size": 32, "num_attention_heads": 4}) == 8
    assert head_width({"text_config": {"head_dim": 7}}) == 7
    pair = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    assert head_width({"encoder": pair, "decoder": pair}) is None  # of two stacks either may have other sizes
    assert depth({"encoder": pair, "decoder": pair}) is None
    assert head_width({"hidden_size": 33, "num_attention_heads": 4}) is None
    assert head_width({"hidden_dim": 64, "n_heads": 4}) is None  # of DistilBERT's FFN
    assert head_width({"emb_dim": 64, "n_heads": 4}) == 16  # of XLM
    assert head_width({"hidden_size": "32", "num_attention_heads": 0}) is None
    assert depth({"num_hidden_layers": True}) is None


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.0.self_attn.q_proj", "routing"),
        ("encoder.layer.0.attention.self.key", "routing"),
        ("model.layers.0.self_attn.o_proj", "values"),
        ("encoder.layer.0.attention.output.dense", "values"),
        ("transformer.h.0.attn.c_attn", None),
        ("model.layers.0.post_attention_layernorm", None),
        ("model.layers.0.mlp.experts", "FFN"),
        ("model.decoder.layers.0.fc1", "FFN"),
        ("rwkv.blocks.0.feed_forward.key", "FFN"),
        ("model.layers.0.mixer.in_proj", None),
    ],
)
def test_roles(name: str, role: str | None) -> None:
    assert role_of(name) == role

"""Tensors in the order of depth, and in one sentence."""

from __future__ import annotations

import math

import pytest

from duat_cli.checks.verdict.moved import Depths, moved_tensors

KINDS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
TENSORS = [
    "model.embed_tokens.weight",
    *(f"model.layers.{block}.{kind}.weight" for block in range(6) for kind in KINDS),
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("model.embed_tokens.weight", -1),
        ("transformer.wte.weight", -1),
        ("transformer.wpe.weight", -1),
        ("bert.embeddings.LayerNorm.weight", -1),
        ("bert.embeddings.word_embeddings.weight", -1),
        ("gpt_neox.embed_in.weight", -1),
        ("shared.weight", -1),
        ("model.layers.3.mlp.up_proj.weight", 3),
        ("h.11.attn.c_attn.weight", 11),
        ("model.norm.weight", math.inf),
        ("lm_head.weight", math.inf),
        ("embed_out.weight", math.inf),
        ("cls.predictions.decoder.weight", math.inf),
    ],
)
def test_depth_by_name(name: str, depth: float) -> None:
    assert Depths().of_tensor(name) == depth


def test_depth_by_the_models_own_order() -> None:
    """A decoder's block 0 stands behind the encoder's; the file may lack the prefix of the model's modules."""
    depths = Depths([f"model.{stack}.layers.{n}" for stack in ("encoder", "decoder") for n in range(2)])
    names = ("encoder.layers.1.fc1.weight", "model.decoder.layers.0.fc1.weight", "x.model.decoder.layers.1.fc1.weight")
    assert [depths.of_tensor(name) for name in names] == [1, 2, 3]


def said(*moved: str) -> str:
    return moved_tensors(moved, TENSORS, Depths())


def test_a_merged_adapter() -> None:
    moved = [n for n in TENSORS if "q_proj" in n or "v_proj" in n]
    assert said(*moved) == (
        "12 tensors moved, first 'model.layers.0.self_attn.q_proj.weight': all of q_proj and v_proj in blocks 0-5"
    )


def test_a_whole_block() -> None:
    assert said(*(n for n in TENSORS if ".4." in n)) == (
        "3 tensors moved, first 'model.layers.4.self_attn.q_proj.weight': all of block 4"
    )


def test_parts_and_what_stands_in_no_block() -> None:
    assert said("lm_head.weight", "model.layers.5.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight") == (
        "3 tensors moved, first 'model.layers.2.mlp.up_proj.weight': all of up_proj in blocks 2, 5; 'lm_head.weight'"
    )
    assert said(*TENSORS) == "all 21 tensors moved, first 'model.embed_tokens.weight'"


def test_kinds_of_one_last_name_are_told_apart() -> None:
    names = ["h.0.attn.c_proj.weight", "h.0.mlp.c_proj.weight"]
    assert moved_tensors(names, [*names, "h.0.ln.weight"], Depths()).endswith(
        "attn.c_proj.weight and mlp.c_proj.weight in block 0"
    )

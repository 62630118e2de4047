"""The parts of a block, by the names that its author gave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import first_two, single_model
from torch import nn
from two_blocks import single

from duat_cli.models.arrays import random_signs
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.discovery.structure import ModelStructure, discover

PARTS: dict[str, tuple[set[str], set[str], str | None, str]] = {
    "llama": ({"mlp"}, {"input_layernorm", "post_attention_layernorm"}, "self_attn.v_proj", "self_attn.o_proj"),
    "mixtral": ({"mlp"}, {"input_layernorm", "post_attention_layernorm"}, "self_attn.v_proj", "self_attn.o_proj"),
    "qwen3": (
        {"mlp"},
        {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"},
        "self_attn.v_proj",
        "self_attn.o_proj",
    ),
    "gemma2": (
        {"mlp"},
        {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"},
        "self_attn.v_proj",
        "self_attn.o_proj",
    ),
    "phi3": ({"mlp"}, {"input_layernorm", "post_attention_layernorm"}, "self_attn.qkv_proj", "self_attn.o_proj"),
    "phi": ({"mlp"}, {"input_layernorm"}, "self_attn.v_proj", "self_attn.dense"),
    "gpt2": ({"mlp"}, {"ln_1", "ln_2"}, "attn.c_attn", "attn.c_proj"),
    "gpt_neox": (
        {"mlp"},
        {"input_layernorm", "post_attention_layernorm"},
        "attention.query_key_value",
        "attention.dense",
    ),
    "opt": ({"activation_fn"}, {"self_attn_layer_norm", "final_layer_norm"}, "self_attn.v_proj", "self_attn.out_proj"),
    "mpt": ({"ffn.act"}, {"norm_1", "norm_2"}, "attn.Wqkv", "attn.out_proj"),
    "bert": (
        {"intermediate"},
        {"attention.output.LayerNorm", "output.LayerNorm"},
        "attention.self.value",
        "attention.output.dense",
    ),
    "distilbert": ({"ffn"}, {"sa_layer_norm", "output_layer_norm"}, "attention.v_lin", "attention.out_lin"),
    "deepseek_v3": (
        {"mlp"},
        {"input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"},
        None,
        "self_attn.o_proj",
    ),
}


def named(structure: ModelStructure) -> list[tuple[dict[nn.Module, str], Any]]:
    return [({m: n for n, m in b.parts.module.named_modules()}, b.parts) for b in structure.blocks]


@pytest.mark.parametrize("model_type", list(PARTS))
def test_the_parts_of_a_block(model_type: str) -> None:
    units, norms, value, output = PARTS[model_type]
    _, structure = single(model_type)
    assert len(structure.blocks) == len(structure.calls) == 2
    for names, parts in named(structure):
        assert {names[u] for u in parts.units} == units
        assert {names[n] for n in parts.norms} == norms
        assert (parts.value_projection and names[parts.value_projection.linear]) == value
        assert names[parts.output_projection.linear] == output
        assert len(parts.attention) == 1
    assert structure.hidden_size == 32
    assert structure.uncovered == ()


FIRST_LINEARS = {
    "llama": "mlp.gate_proj", "phi3": "mlp.gate_up_proj", "gpt2": "mlp.c_fc", "bert": "intermediate.dense",
    "distilbert": "ffn.lin1", "phi": "mlp.fc1", "gpt_neox": "mlp.dense_h_to_4h",
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(FIRST_LINEARS))
def test_the_first_linear_layer_of_an_ffn(model_type: str) -> None:
    for names, parts in named(single(model_type)[1]):
        assert [names[parts.first_linears[u]] for u in parts.units] == [FIRST_LINEARS[model_type]]


def test_the_output_bias_of_an_ffn_is_its_last_layers() -> None:
    for block in single("gpt2")[1].blocks:
        mlp = block.parts.module.mlp
        assert torch.equal(block.parts.unit_biases[mlp], mlp.c_proj.bias)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 3.0), (torch.float16, 100.0), (torch.float32, 1e4)])
def test_the_output_bias_of_an_ffn_is_found_however_large_its_output_is(dtype: torch.dtype, size: float) -> None:
    model = first_two(single_model("gpt2"))
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.mlp.c_proj.weight[:, 3] *= size  # one channel far larger than the bias, as trained models have
    for block in discover(model.to(dtype)).blocks:
        mlp = block.parts.module.mlp
        assert torch.equal(block.parts.unit_biases[mlp], mlp.c_proj.bias)


class Normed(nn.Module):
    """An FFN whose last layer has a norm behind it, so that its bias is no constant of the output."""

    def __init__(self, mlp: nn.Module, gain: float) -> None:
        super().__init__()
        self.mlp, self.norm = mlp, nn.LayerNorm(32)
        nn.init.constant_(self.norm.weight, gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(x))


def test_a_bias_in_front_of_a_norm_is_no_output_bias() -> None:
    model = first_two(single_model("gpt2"))
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.mlp.c_proj.weight *= 1e6  # the bias is lost in the rounding of the output
            layer.mlp = Normed(layer.mlp, 1.0)
    for block in discover(model).blocks:
        assert block.parts.unit_biases == {}


LARGE_BIASES = [
    (torch.bfloat16, 30.0),
    (torch.float16, 300.0),
    (torch.float32, 1e3),
    (torch.float32, 1e5),
    (torch.float64, 1e5),
]


@pytest.mark.parametrize(("dtype", "bias"), LARGE_BIASES)
def test_an_ffn_is_a_unit_however_large_its_output_bias_is(dtype: torch.dtype, bias: float) -> None:
    model = first_two(single_model("gpt2")).to(dtype)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.mlp.c_proj.bias += (bias * random_signs(layer.mlp.c_proj.bias.float(), seed=0)).to(dtype)
    for names, parts in named(discover(model)):
        assert {names[unit] for unit in parts.units} == {"mlp"}
        assert [names[parts.first_linears[unit]] for unit in parts.units] == ["mlp.c_fc"]
        assert [names[unit] for unit in parts.unit_biases] == ["mlp"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_ffn_is_a_unit_where_one_neuron_reads_a_channel_that_hardly_moves(dtype: torch.dtype) -> None:
    """As the neuron that takes a massive activation out again: a random vector moves it far more than the stream."""
    model = first_two(single_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[3] = 1e-3
            layer.mlp.gate_proj.weight[0, 3] = 30.0
            layer.mlp.up_proj.weight[0, 3] = 30.0
            layer.mlp.down_proj.weight[5, 0] = 30.0
    for names, parts in named(discover(model.to(dtype))):
        assert {names[unit] for unit in parts.units} == {"mlp"}


@pytest.mark.parametrize(("dtype", "bias"), LARGE_BIASES)
def test_an_affine_module_is_no_unit_however_large_its_bias_is(dtype: torch.dtype, bias: float) -> None:
    model = first_two(single_model("gpt2")).to(dtype)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.mlp.act = nn.Identity()
            layer.mlp.c_proj.bias += (bias * random_signs(layer.mlp.c_proj.bias.float(), seed=0)).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _, parts in named(discover(model)):
        assert parts.units == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_experts_beside_their_router_are_a_unit_and_the_router_is_none() -> None:
    structure = discover(single_model("diffusion_gemma_text"))
    for names, parts in named(structure):
        assert {names[unit] for unit in parts.units} == {"mlp", "experts"}
    assert structure.uncovered == ()


def test_tokens_in_front_of_the_batch_are_read_as_any_others() -> None:
    """XLNet's attention holds its own residual and norm; the layers behind are its FFN's, not attention's."""
    structure = discover(first_two(single_model("xlnet")))
    assert structure.plain_error == 0
    for block in structure.blocks:
        assert block.parts.hidden.turned
        assert block.parts.output_projection is None
        assert [type(unit).__name__ for unit in block.parts.units] == ["GELUActivation"]
        assert block.parts.mixing == frozenset()


class Wrapped(nn.Module):
    """Calls another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.inner(*args, **named)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "bert"])
@pytest.mark.parametrize("wrap", [nn.Sequential, Wrapped])
def test_a_module_that_only_calls_a_norm_is_no_unit(model_type: str, wrap: type[nn.Module]) -> None:
    model = first_two(single_model(model_type))
    _, structure = single(model_type)
    known = structure.block(0).parts
    for path in [name for name, module in structure.stack.named_modules() if module in known.norms]:
        parent, _, name = path.rpartition(".")
        within = stack_of(model).get_submodule(parent)
        setattr(within, name, wrap(getattr(within, name)))
    found = discover(model).block(0).parts
    assert len(found.norms) == len(known.norms)
    assert [type(unit) for unit in found.units] == [type(unit) for unit in known.units]
    assert (found.value_projection is None) == (known.value_projection is None)
    assert found.arrives == known.arrives

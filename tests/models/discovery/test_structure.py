"""Discovery: what is found on models of many wirings, what is refused, and that broken blocks never pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import WIRINGS, InDouble, dense_blocks, double_model, far, first_two, single_model, sweep, token_ids
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from duat_cli.analysis.support import examine
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery import structure as discovery
from duat_cli.models.discovery.parts import find_parts
from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.factors import operator_of
from duat_cli.results.support import SupportEntry


# type -> (units of a block, its norms, value layer, output layer), by their names in the block
def test_a_shared_block_is_called_more_often_than_it_exists() -> None:
    structure = discover(single_model("albert"))
    assert (len(structure.calls), len(structure.blocks)) == (3, 1)
    assert set(structure.calls) == {b.parts.module for b in structure.blocks}


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_an_encoder_decoder_is_its_encoder_and_says_so(model_type: str) -> None:
    structure = discover(single_model(model_type))
    assert any("only the encoder" in note for note in structure.uncovered)


# -- mixers --------------------------------------------------------------------------------------------------


def test_what_mixes_tokens_beside_attention_is_noted() -> None:
    model = first_two(single_model("falcon_h1"))
    for count, said in ((1, "attention in block 0; its output"), (2, "attention; its output")):
        for layer in model.model.layers[:count]:  # what stands behind its kernel is no scale of channels
            layer.mamba.out_proj = nn.Sequential(nn.Tanh(), layer.mamba.out_proj)
        entry = examine(model)
        assert entry.status == "partly"
        assert any(note.startswith(f"FalconH1Mixer mixes tokens without softmax {said}") for note in entry.parts)


def test_a_model_without_a_mixer_that_can_be_proved_is_refused_by_name() -> None:
    model = single_model("fnet")
    with pytest.raises(UnsupportedModelError) as error:
        discover(model)
    text = str(error.value)
    assert type(model).__name__ in text
    assert "neither softmax attention nor a mixer" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("model_type", "mechanism"),
    [
        ("reformer", "2 streams side by side"),
        ("xlm", "lists of its own"),
        ("jetmoe", "a router inside of it"),
        ("inkling2_text", "it calls attention 2 times, each over another number of tokens"),
    ],
)
def test_a_refusal_names_the_mechanism(model_type: str, mechanism: str) -> None:
    with pytest.raises(UnsupportedModelError, match=mechanism):
        discover(single_model(model_type))


# -- broken blocks -------------------------------------------------------------------------------------------

Forward = Callable[..., Any]
_own_block, _own_mlp, _own_attention = LlamaDecoderLayer.forward, LlamaMLP.forward, LlamaAttention.forward


def _around_stream(change: Callable[[Tensor], Tensor]) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return change(_own_block(self, hidden_states, *args, **kwargs))

    return forward


def _without_ffn_module(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The FFN as functions in the block: no module's output holds its nonlinearity."""
    residual = hidden_states
    hidden_states, _ = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
    residual = residual + hidden_states
    x, mlp = self.post_attention_layernorm(residual), self.mlp
    return residual + mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def _gate_per_channel(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    output, weights = _own_attention(self, hidden_states, *args, **kwargs)
    return output * torch.sigmoid(hidden_states), weights


def _sigmoid_on_values(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = self.v_proj
    self.v_proj = _Applied(plain, torch.sigmoid)
    try:
        return _own_attention(self, hidden_states, *args, **kwargs)
    finally:
        self.v_proj = plain


class _Applied(nn.Module):
    def __init__(self, linear: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = linear, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def _tanh_between(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    residual = hidden_states
    hidden_states, _ = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
    residual = torch.tanh(residual + hidden_states)
    return residual + self.mlp(self.post_attention_layernorm(residual))


def _attention_on_squares(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    output, weights = _own_attention(self, hidden_states, *args, **kwargs)
    return output * output, weights


def _noisy(x: Tensor) -> Tensor:
    return x + 0.01 * torch.randn_like(x)


BROKEN: dict[str, tuple[type[nn.Module], Forward]] = {
    "tanh on the stream": (LlamaDecoderLayer, _around_stream(torch.tanh)),
    "tanh inside the block": (LlamaDecoderLayer, _tanh_between),
    "the stream times its size": (LlamaDecoderLayer, _around_stream(lambda x: x * x.norm(dim=-1, keepdim=True))),
    "a clamp": (LlamaDecoderLayer, _around_stream(lambda x: x.clamp(-0.5, 0.5))),
    "rounding": (LlamaDecoderLayer, _around_stream(lambda x: (x * 10).round() / 10)),
    "noise": (LlamaDecoderLayer, _around_stream(_noisy)),
    "FFN without a module": (LlamaDecoderLayer, _without_ffn_module),
    "attention's output squared": (LlamaAttention, _attention_on_squares),
}


def llama() -> Any:
    """Two blocks."""
    return first_two(single_model("llama"))


@functools.cache
def sound() -> SupportEntry:
    """What is said of them as they are."""
    return examine(llama())


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_block_is_refused_with_what_was_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, forward = BROKEN[name]
    assert sound().status == "exact"
    monkeypatch.setattr(cls, "forward", forward)
    entry = examine(llama())
    assert entry.status == "refused"
    assert entry.relative_error is None
    assert entry.reason is not None
    assert "layers.0" in entry.reason
    assert "not affine" in entry.reason or "its own output" in entry.reason


@pytest.mark.parametrize("see_each_other", [False, True])
def test_items_that_see_each_other_are_replayed_alone(see_each_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if see_each_other:
        monkeypatch.setattr(LlamaDecoderLayer, "forward", _around_stream(lambda x: x + (x - x.mean(0))))
    model = llama()
    assert [block.parts.batched for block in discover(model).blocks] == [not see_each_other] * 2
    assert examine(model).status == "exact"


def output_parts(model: Any) -> list[Any]:
    """Every block's three parts and certificate."""
    found: list[Any] = []
    sweep(model, token_ids(model), lambda run, step, block: found.append(step.terms))
    return found


def test_a_gate_per_channel_is_held_and_costs_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is affine with the gate held; W' is no sum of one Kronecker product a head, and has no number."""
    monkeypatch.setattr(LlamaAttention, "forward", _gate_per_channel)
    model = llama()
    entry = examine(model)
    assert entry.status == "partly"
    assert len(entry.parts) == 2
    assert all("gate" in part and "no sum of Kronecker products" in part for part in entry.parts)
    for terms in output_parts(model):
        assert terms.error <= 1e-5
        assert terms.output.static.norm == 0.0  # llama has no bias, and a gate times nothing is nothing


def test_a_nonlinearity_on_the_values_is_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """sigmoid(W_V x) held is a constant of this input: a UAT term or a refusal, but not what biases make."""
    monkeypatch.setattr(LlamaAttention, "forward", _sigmoid_on_values)
    model = llama()
    if examine(model).status == "refused":
        return
    assert all(terms.output.static.norm <= 1e-6 for terms in output_parts(model))


def test_a_stream_changed_between_blocks_is_read_by_the_name_of_its_list_alone() -> None:
    model = llama()
    layer = model.model.layers[1]
    handle = layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.01, *args[1:]))
    with pytest.raises(UnsupportedModelError, match=r"input of block 1 is 1\.01 times .* by --stack layers"):
        discover(model)
    [stack] = examine(model).stacks
    assert stack.status == "partly"
    assert "in front of block 1, the model changes the stream" in str(stack.reason)
    handle.remove()
    assert examine(model).status == "exact"


def _stream_into_mlp(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    attended, _ = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
    return self.mlp(hidden_states + attended)


def _mlp_with_stream(self: Any, x: Tensor) -> Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(self.norm(x))))


def _gated_mlp_with_stream(self: Any, x: Tensor) -> Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(self.norm(x))) * self.up_proj(x))


def _mlp_with_stream_and_no_norm(self: Any, x: Tensor) -> Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(x)))


def _llama_with(mlp: Forward, monkeypatch: pytest.MonkeyPatch, *, square: bool = False) -> Any:
    """A llama in float64 whose FFN module holds the residual stream; `square`: the FFN is as wide as the stream."""
    model = first_two(double_model("llama"))
    for layer in model.model.layers:
        layer.mlp.norm = layer.post_attention_layernorm
        if square:
            side = model.config.hidden_size
            for name, shape in (("gate_proj", slice(side)), ("up_proj", slice(side))):
                linear = getattr(layer.mlp, name)
                linear.weight = nn.Parameter(linear.weight[shape])
            layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :side])
    monkeypatch.setattr(LlamaMLP, "forward", mlp)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", _stream_into_mlp)
    return model


def test_an_ffn_that_holds_the_residual_stream_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama_with(_mlp_with_stream, monkeypatch)
    ids = token_ids(model)
    expected = dense_blocks(model, ids, WIRINGS["llama"])
    errors: list[float] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        assert [type(u).__name__ for u in block.parts.units] == [type(model.model.layers[0].mlp.act_fn).__name__]
        operator = operator_of(run, block.factors, step)
        errors.extend([step.terms.error, far(operator.matrix().dense(), expected[run.index].W)])

    with InDouble():
        sweep(model, ids, listen)
    assert len(errors) == 4
    assert max(errors) <= 1e-10


def test_a_gate_beside_the_opened_activation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """silu(gate) * up read by one layer: linear in the stream only while the other factor stands still."""
    with InDouble():
        entry = examine(_llama_with(_gated_mlp_with_stream, monkeypatch))
    assert entry.status == "refused"
    assert entry.reason


def test_the_operator_ends_at_the_stream_not_behind_the_ffns_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No norm between attention and the FFN, whose activation is the unit and as wide as the stream."""
    model = _llama_with(_mlp_with_stream_and_no_norm, monkeypatch, square=True)
    ids = token_ids(model)
    expected = dense_blocks(model, ids, WIRINGS["llama"])
    errors: list[float] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        if block.factors is not None:
            operator = operator_of(run, block.factors, step)
            errors.append(far(operator.matrix().dense(), expected[run.index].W))

    with InDouble():
        sweep(model, ids, listen)
    assert max(errors, default=0.0) <= 1e-10


def test_an_ffn_that_mixes_tokens_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sound().status == "exact"
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: _own_mlp(self, x + x.mean(1, keepdim=True)))
    entry = examine(llama())
    assert entry.status == "partly"
    assert any("LlamaMLP mixes tokens" in note for note in entry.parts)


def test_the_certificate_catches_what_discovery_could_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clamp that no value reaches in discovery and that bites in the run: the error shows it."""
    limit = [1e6]
    monkeypatch.setattr(
        LlamaDecoderLayer, "forward", _around_stream(lambda x: x.clamp(-limit[0], limit[0]))
    )  # fmt: skip
    model = llama()
    errors: list[float] = []
    sweep(model, token_ids(model), lambda run, step, block: errors.append(step.terms.error))
    assert max(errors) <= 1e-5
    errors.clear()

    def listen(run: Any, step: Any, block: Any) -> None:
        errors.append(step.terms.error)
        limit[0] = 0.5

    sweep(model, token_ids(model), listen)
    assert max(errors) > 1e-2


def test_a_wrong_call_of_eager_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not those of the output: H is refitted row by row, or the block is refused."""
    own = modeling_llama.eager_attention_forward

    def lying(*args: Any, **kwargs: Any) -> Any:
        output, weights = own(*args, **kwargs)
        return output, weights.roll(1, -1)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lying)
    entry = examine(llama())
    assert entry.status == "refused"


def test_discovery_does_not_depend_on_the_models_dtype_where_its_norms_follow_it() -> None:
    with InDouble():
        entry = examine(first_two(double_model("llama")))
    assert entry.status == "exact"
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-13


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere"])
def test_a_norm_that_computes_in_float32_is_still_a_norm_in_float64(model_type: str) -> None:
    """transformers' RMSNorm casts to float32: taken for an FFN, it would make attention a UAT term."""
    single, double = (
        output_parts(first_two(model)) for model in (single_model(model_type), single_model(model_type).double())
    )
    for one, two in zip(single, double, strict=True):
        assert two.error <= 1e-6
        for name in ("linear", "static", "dynamic"):
            assert getattr(one.output, name).share == pytest.approx(getattr(two.output, name).share, abs=1e-5)


def test_numbers_that_overflow_are_not_laid_at_the_block_s_door() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1e30
    with pytest.raises(UnsupportedModelError, match=r"\(inf\); numbers leave the range of float32 .* far too large\?$"):
        discover(model)


def test_factors_are_looked_for_only_where_they_are_wanted() -> None:
    model = llama()
    with_factors, without = discover(model), discover(model, factors=False)
    assert all(block.factors is not None for block in with_factors.blocks)
    assert all(block.factors is None for block in without.blocks)
    for one, other in zip(with_factors.blocks, without.blocks, strict=True):
        assert (one.notes, one.parts.units, one.parts.batched) == (other.notes, other.parts.units, other.parts.batched)


def test_what_happened_in_a_block_is_let_go_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a large picture the attention matrices of all blocks would not fit."""
    kept: list[weakref.ref[Trace]] = []

    def look(event: Event, name: str, written: Trace) -> BlockParts:
        assert [one for one in kept if one() is not None] == []
        kept.append(weakref.ref(written))
        return find_parts(event, name, written)

    monkeypatch.setattr(discovery, "find_parts", look)
    assert len(discover(llama()).blocks) == len(kept) > 1

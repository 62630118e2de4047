"""The UAT sum: shares sum to 1, zero parts are zero, it is the paper's sum built by hand, and a wrong one shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import WIRINGS, InDouble, dense_blocks, double_model, far, single_model, token_ids
from torch import Tensor, nn

from duat_cli.analysis.decomposition import (
    BlockTerms,
    Carried,
    Decomposition,
    ThreeParts,
)
from duat_cli.models.arrays import relative_error, relative_errors, token_changes, token_errors
from duat_cli.models.discovery import proof
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.shares import PartNumbers, shares

BIASED = ["gpt2", "phi", "opt", "gpt_neox", "bloom", "gptj", "starcoder2", "bert", "distilbert", "gpt_oss"]
BARE = ["llama", "qwen3", "mixtral", "gemma2", "olmo2", "deepseek_v3", "granite"]


@dataclass(frozen=True)
class Carry:
    """What one sweep carried to each block's output."""

    blocks: list[BlockTerms]
    last: Carried
    output: Tensor


def carried(
    model: Any,
    ids: Tensor,
    *,
    one_by_one: bool = False,
    before: Callable[[Any], None] | None = None,
    structure: ModelStructure | None = None,
) -> Carry:
    structure, decomposition = structure or discover(model), Decomposition(one_by_one=one_by_one, own=True)
    blocks: list[BlockTerms] = []
    outputs: list[Tensor] = []

    def listen(run: Any) -> None:
        if before is not None:
            before(run)
        blocks.append(decomposition.advance(run).terms)
        outputs.append(run.output[0])

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    assert decomposition.carried is not None
    return Carry(blocks, decomposition.carried, outputs[-1])


@functools.cache
def in_double(model_type: str) -> Carry:
    """Of the tokens of `token_ids`; it is only read."""
    model = double_model(model_type)
    with InDouble():
        return carried(model, token_ids(model))


def three(parts: ThreeParts) -> list[PartNumbers]:
    return [parts.linear, parts.static, parts.dynamic]


def static_of(last: Carried) -> Tensor:
    return torch.zeros_like(last.linear) if last.static is None else last.static


# -- laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [*BIASED, *BARE])
def test_the_shares_of_every_place_sum_to_one(model_type: str) -> None:
    for block in in_double(model_type).blocks:
        assert block.error <= 1e-12
        assert sum(p.share for p in three(block.output)) == pytest.approx(1.0, abs=1e-10)
        if block.pre_activation is None:
            assert block.pre_activation_reason
        else:
            assert block.pre_activation_reason is None
            assert sum(p.share for p in three(block.pre_activation)) == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "gemma2"])
def test_and_in_float32(model_type: str) -> None:
    model = single_model(model_type)
    for block in carried(model, token_ids(model)).blocks:
        assert block.error <= 1e-5
        assert sum(p.share for p in three(block.output)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "gemma2", "falcon"])
def test_the_pieces_sum_to_the_output_and_the_terms_to_the_dynamic_piece(model_type: str) -> None:
    model = double_model(model_type)
    with InDouble():
        result = carried(model, token_ids(model), one_by_one=True)
    last = result.last
    assert far(last.linear + static_of(last) + last.dynamic, result.output) <= 1e-12
    assert len(last.terms) == len(result.blocks)
    assert far(sum(last.terms), last.dynamic) <= 1e-12
    assert min(float(t.norm()) for t in last.terms) > 1e-3 * float(result.output.norm())
    numbers = shares([last.linear, static_of(last), *last.terms], result.output).parts
    assert sum(n.share for n in numbers) == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_a_model_without_biases_has_no_static_part(model_type: str) -> None:
    model = double_model(model_type)
    for name, p in model.named_parameters():
        assert "bias" not in name or not bool(p.any()), name
    for block in in_double(model_type).blocks:
        assert block.output.static == PartNumbers(0.0, 0.0, 0.0)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "opt"])
def test_a_model_with_biases_has_one(model_type: str) -> None:
    assert all((b.output.static.norm or 0) > 1e-3 for b in in_double(model_type).blocks)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_without_what_its_ffn_writes_a_model_has_no_dynamic_part(model_type: str) -> None:
    """The layer behind the nonlinearity is zero; its bias stays and is static."""
    model = double_model(model_type)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("mlp.down_proj.weight", "mlp.c_proj.weight")) or (
                name.endswith("output.dense.weight") and "attention" not in name
            ):
                p.zero_()
    with InDouble():
        result = carried(model, token_ids(model))
    assert len(result.blocks) == 3
    for block in result.blocks:
        assert block.output.dynamic.norm == pytest.approx(0.0, abs=1e-13)
        assert block.error <= 1e-12


def test_a_zero_attention_leaves_the_input_and_the_ffn() -> None:
    """llama without attention: the linear part at the output is x_0 itself, bit by bit almost."""
    model = double_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    ids = token_ids(model)
    with InDouble():
        result = carried(model, ids)
    assert far(result.last.linear, model.model.embed_tokens(ids)[0]) <= 1e-14


# -- by hand -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """x_i = T_i x_{i-1} + c_i + f_i with dense T_i: the paper's Eq. 11/33, piece by piece."""

    linear: list[Tensor]
    static: list[Tensor]
    terms: list[list[Tensor]]  # per block, every term so far at its output
    pre: list[tuple[Tensor, Tensor, Tensor]]  # linear, static, dynamic in front of the nonlinearity
    x: list[Tensor]


def by_hand(
    model: Any, ids: Tensor, model_type: str, ffn: str, first: str, norm: str, output_bias: Callable[[Any], Tensor]
) -> ByHand:
    """Pre-norm blocks: x' = x + W' x + c_A, x'' = x' + f + b, with the FFN's real output f + b from a hook."""
    blocks = model.get_submodule(WIRINGS[model_type].blocks)
    seen: dict[str, list[Tensor]] = {"ffn": [], "first": [], "x": [], "middle": []}
    handles = []
    for block in blocks:
        handles += [
            block.get_submodule(ffn).register_forward_hook(lambda m, a, o: seen["ffn"].append(o[0])),
            block.get_submodule(first).register_forward_hook(lambda m, a, o: seen["first"].append(o[0])),
            block.get_submodule(norm).register_forward_pre_hook(lambda m, a: seen["middle"].append(a[0][0])),
        ]
    with torch.no_grad(), InDouble():
        hidden = model.base_model(input_ids=ids, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    Ws = [dense.W for dense in dense_blocks(model, ids, WIRINGS[model_type])]
    result = ByHand([], [], [], [], [])
    n, width = hidden[0][0].shape
    linear, static, terms = hidden[0][0].reshape(-1), torch.zeros(n * width, dtype=torch.float64), []
    for k, (block, W) in enumerate(zip(blocks, Ws, strict=True)):
        x, middle, out = hidden[k][0].reshape(-1), seen["middle"][k].reshape(-1), seen["ffn"][k]
        T = torch.eye(n * width, dtype=torch.float64) + W
        constant = middle - T @ x  # c_A: attention's biases and its norm's
        linear, static, terms = T @ linear, T @ static + constant, [T @ t for t in terms]
        result.pre.append(_pre(block, first, norm, seen["middle"][k], [linear, static, sum(terms, 0 * linear)]))
        assert far(sum(result.pre[-1]), seen["first"][k]) <= 1e-10
        bias = output_bias(block).expand(n, width).reshape(-1)
        static, terms = static + bias, [*terms, out.reshape(-1) - bias]
        result.linear.append(linear.reshape(n, width))
        result.static.append(static.reshape(n, width))
        result.terms.append([t.reshape(n, width) for t in terms])
        result.x.append((middle + out.reshape(-1)).reshape(n, width))
    return result


def _pre(block: Any, first: str, norm: str, middle: Tensor, pieces: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """W1 of the frozen norm on every piece; the norm's bias and W1's are static."""
    module, layer = block.get_submodule(norm), block.get_submodule(first)
    weight = layer.weight if type(layer).__name__ == "Conv1D" else layer.weight.T  # (in, out)
    centered = isinstance(module, nn.LayerNorm)
    eps = module.eps if centered else module.variance_epsilon

    def projected(z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True) if centered else z

    scale = 1 / (projected(middle).square().mean(-1, keepdim=True) + eps).sqrt()
    images = [projected(p.reshape(middle.shape)) * scale * module.weight @ weight for p in pieces]
    if centered:
        images[1] = images[1] + module.bias @ weight
    if layer.bias is not None:
        images[1] = images[1] + layer.bias
    return images[0], images[1], images[2]


HAND = {
    "llama": ("mlp", "mlp.gate_proj", "post_attention_layernorm", lambda b: torch.zeros(1, dtype=torch.float64)),
    "gpt2": ("mlp", "mlp.c_fc", "ln_2", lambda b: b.mlp.c_proj.bias),
}


@pytest.mark.parametrize("model_type", list(HAND))
def test_the_sum_is_the_papers_built_by_hand(model_type: str) -> None:
    model = double_model(model_type)
    ids = token_ids(model)
    with torch.no_grad():
        expected = by_hand(model, ids, model_type, *HAND[model_type])
        with InDouble():
            got = carried(model, ids, one_by_one=True)
    assert far(got.last.linear, expected.linear[-1]) <= 1e-10
    assert float((static_of(got.last) - expected.static[-1]).norm()) <= 1e-10 * float(got.output.norm())
    for term, own in zip(got.last.terms, expected.terms[-1], strict=True):
        assert far(term, own) <= 1e-10
    for k, block in enumerate(got.blocks):
        parts = [expected.linear[k], expected.static[k], sum(expected.terms[k])]
        assert_numbers(block.output, parts, expected.x[k])
        assert_own(block, expected.terms[k][-1], expected.x[k])
        assert block.pre_activation is not None
        assert_numbers(block.pre_activation, list(expected.pre[k]), sum(expected.pre[k]))
    assert got.blocks[-1].output.dynamic.share > 0.05  # there is something to compare
    assert got.blocks[-1].pre_activation.dynamic.share > 0.05


def assert_own(block: BlockTerms, term: Tensor, x: Tensor) -> None:
    assert block.own is not None
    assert block.own.share == pytest.approx(float((term * x).sum() / x.square().sum()), abs=1e-10)
    assert block.own.norm == pytest.approx(float(term.norm() / x.norm()), abs=1e-10)


def _behind_norm(block: Any, seen: dict[str, Tensor]) -> Tensor:
    return seen["post_feedforward_layernorm"]  # an RMSNorm without a bias: frozen, it is linear


def _behind_layer(block: Any, seen: dict[str, Tensor]) -> Tensor:
    return seen["activation_fn"] @ block.fc2.weight.T


def _scaled(block: Any, seen: dict[str, Tensor]) -> Tensor:
    return 0.6 * seen["mlp"]


def _in_front_of_norm(block: Any, seen: dict[str, Tensor]) -> Tensor:
    """The share of the dense layer's output that its norm lets through, by the norm's own scale."""
    norm, term = block.output.LayerNorm, seen["intermediate"] @ block.output.dense.weight.T
    (into,) = seen["output.LayerNorm.in"]
    scale = ((into - into.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (term - term.mean(-1, keepdim=True)) * scale * norm.weight


OWN = {
    "gemma2": (["post_feedforward_layernorm"], _behind_norm),
    "opt": (["activation_fn"], _behind_layer),
    "granite": (["mlp"], _scaled),
    "bert": (["intermediate", "output.LayerNorm"], _in_front_of_norm),
}


@pytest.mark.parametrize("model_type", list(OWN))
def test_a_blocks_own_term_where_more_stands_between_it_and_the_stream(model_type: str) -> None:
    names, term_of = OWN[model_type]
    model = double_model(model_type)
    if model_type == "granite":
        for module in model.modules():
            if hasattr(module, "residual_multiplier"):
                module.residual_multiplier = 0.6
    ids = token_ids(model)
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    seen: list[dict[str, Tensor]] = [{} for _ in blocks]
    for block, place in zip(blocks, seen, strict=True):
        for name in names:

            def keep(m: Any, a: Any, o: Any, place: dict[str, Any] = place, name: str = name) -> None:
                place[name], place[f"{name}.in"] = o.reshape(-1, o.shape[-1]), a

            block.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad(), InDouble():
        hidden = model.base_model(input_ids=ids, output_hidden_states=True).hidden_states
        outputs = [x[0] for x in hidden[1:]]
        expected = [term_of(b, s) for b, s in zip(blocks, seen, strict=True)]
        got = carried(model, ids)
    for block, term, x in list(zip(got.blocks, expected, outputs, strict=True))[:-1]:  # the last passes a final norm
        assert_own(block, term.reshape(x.shape), x)
        assert (block.own.norm or 0) > 0.01


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "phi"])
def test_an_own_term_that_arrives_as_it_is_is_what_its_replay_gives(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = double_model(model_type)
    with InDouble():
        structure = discover(model)
        assert all(block.parts.arrives for block in structure.blocks)
        direct = carried(model, token_ids(model), structure=structure)
        monkeypatch.setattr(proof, "_arrives", lambda run, at_zero: False)
        replayed = carried(model, token_ids(model))
    for one, other in zip(direct.blocks, replayed.blocks, strict=True):
        assert one.own is not None
        assert other.own is not None
        assert one.own.share == pytest.approx(other.own.share, abs=1e-12)
        assert one.own.norm == pytest.approx(other.own.norm, abs=1e-12)
        assert (one.own.norm or 0) > 0.01


def test_own_terms_are_the_carried_ones_where_they_begin() -> None:
    """In the first block the own term is all of the dynamic part; later ones hold what came before as well."""
    first, second, _ = in_double("llama").blocks
    assert first.own is not None
    assert second.own is not None
    assert first.own.share == pytest.approx(first.output.dynamic.share, abs=1e-12)
    assert abs(second.own.share - second.output.dynamic.share) > 1e-3


def assert_numbers(got: ThreeParts, parts: list[Tensor], whole: Tensor) -> None:
    size = float(whole.square().sum())
    for numbers, part in zip(three(got), parts, strict=True):
        assert numbers.share == pytest.approx(float((part * whole).sum()) / size, abs=1e-10)
        assert numbers.norm == pytest.approx(float(part.norm()) / size**0.5, abs=1e-10)


def test_the_first_blocks_pre_activation_has_no_dynamic_bias() -> None:
    """Eq. 12: b'_{1,2} holds no UAT term yet, b'_{2,2} does."""
    first, second, _ = (b.pre_activation for b in in_double("llama").blocks)
    assert first is not None
    assert second is not None
    assert first.dynamic.norm == pytest.approx(0.0, abs=1e-12)
    assert second.dynamic.norm > 1e-2


# -- the certificate can fail --------------------------------------------------------------------------------


def _more_attention(run: Any) -> None:
    call = run.recording.attention[0]
    run.recording.attention[0] = replace(call, rows=StoredRows(call.rows.matrix * 1.01))


def _one_weight(run: Any) -> None:
    call = run.recording.attention[0]
    H = call.rows.matrix.clone()
    H[0, -1, 0] += 0.05
    run.recording.attention[0] = replace(call, rows=StoredRows(H))


def _norm_scale(run: Any) -> None:
    for calls in run.recording.norms.values():
        calls[:] = [replace(norm, scale=norm.scale * 1.01) for norm in calls]


def _one_tokens_scale(run: Any) -> None:
    for calls in run.recording.norms.values():
        for norm in calls:
            norm.scale[..., 0, :] *= 1.01


def _ffn_output(run: Any) -> None:
    run.recording.units[:] = [replace(unit, output=unit.output * 1.01) for unit in run.recording.units]


CORRUPTIONS = [_more_attention, _one_weight, _norm_scale, _one_tokens_scale, _ffn_output]


@functools.cache
def discovered(model_type: str) -> tuple[Any, ModelStructure]:
    """In float32. Runs leave both as they are, which each test sees first."""
    model = single_model(model_type)
    return model, discover(model)


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_a_corrupted_recording_misses_the_models_output(model_type: str, corrupt: Callable[[Any], None]) -> None:
    """One hundredth in what was recorded, in one block alone, is far above the tolerance from there on."""
    model, structure = discovered(model_type)
    ids = token_ids(model)
    assert max(b.error for b in carried(model, ids, structure=structure).blocks) <= 1e-5

    def second(run: Any) -> None:
        if run.index == 1:
            corrupt(run)

    errors = [b.error for b in carried(model, ids, before=second, structure=structure).blocks]
    assert errors[0] <= 1e-5
    assert min(errors[1:]) > 1e-4


def _what_the_last_ffn_gives_another_token(run: Any) -> None:
    if run.index == 2:
        more = torch.ones_like(run.output[0])
        more[1] = 1.01
        run.recording.units[:] = [replace(unit, output=unit.output * more) for unit in run.recording.units]


def test_a_massive_activation_does_not_hide_what_is_wrong_of_other_tokens() -> None:
    """The norm over all tokens is that of the first: what the second misses is nothing beside it."""
    model = single_model("llama")
    ids = token_ids(model)
    ids[0, 0] = 0
    assert not bool((ids[0, 1:] == 0).any())
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 3] = 1e4
    sound = carried(model, ids)
    assert max(b.error for b in sound.blocks) <= 1e-5
    wrong = carried(model, ids, before=_what_the_last_ffn_gives_another_token)
    assert relative_error(wrong.last.total, wrong.output) < 1e-5
    assert wrong.blocks[-1].error > 1e-4


def test_the_error_of_a_token_is_relative_to_what_it_was_computed_from() -> None:
    whole = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [1.0, 0.0]])
    got = whole + torch.tensor([[0.0, 0.5], [0.2, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert token_errors(got, whole, [], 2) == pytest.approx([0.1, 0.0])
    assert token_errors(got, whole, [], 1) == pytest.approx([0.1])
    before = torch.tensor([[0.0, 0.0], [20.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert token_errors(got, whole, [before], 1) == pytest.approx([0.1])  # of the first token
    assert token_errors(got[1:], whole[1:], [before[1:]], 1) == pytest.approx([0.2 / 5**0.5])  # over all tokens
    assert token_errors(torch.full((1, 2), 0.1), torch.zeros(1, 2), [], 1) == [float("inf")]
    assert token_errors(got * float("nan"), whole, [], 2) == [float("inf")] * 2


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_errors_of_tiny_and_of_huge_numbers_are_those_of_others(size: float) -> None:
    """Their squares leave the range of float32."""
    whole = torch.full((3, 4), size)
    got = whole * torch.tensor([1.0, 1.25, 1.0])[:, None]
    assert relative_error(got, whole) == pytest.approx(0.25 / 3**0.5, rel=1e-6)
    assert token_errors(got, whole, [], 3) == pytest.approx([0.0, 0.25, 0.0], rel=1e-6)
    assert token_errors(got, whole, [], 1) == pytest.approx([0.25], rel=1e-6)


def test_a_typical_change_is_that_of_tokens_without_massive_activations() -> None:
    before = torch.ones(5, 4)
    before[0], before[4] = 1e4, 0.0  # what is zero has no relative change
    after = before * torch.tensor([1.0, 1.1, 1.2, 1.3, 1.0])[:, None]
    after[4] = 1.0
    assert relative_error(after[:4], before[:4]) < 1e-4
    assert float(token_changes(before, after).quantile(0.5)) == pytest.approx(0.15, rel=1e-5)
    assert float(token_changes(before[:4], after[:4]).quantile(0.5)) == pytest.approx(0.15, rel=1e-5)
    assert token_changes(torch.zeros(2, 4), torch.ones(2, 4)).tolist() == []


def test_errors_of_several_prompts_are_those_of_each() -> None:
    """Tokens of the prompts stand behind each other; one prompt is zero."""
    parts = [torch.randn(6, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (1, 2)]
    whole = parts[0] + parts[1]
    whole[2:4] = 0.0
    errors = relative_errors(parts[0], whole, 3)
    alone = [relative_error(parts[0][k : k + 2], whole[k : k + 2]) for k in (0, 2, 4)]
    assert errors == pytest.approx(alone, rel=1e-12)
    assert errors[1] == float("inf")
    assert relative_errors(whole.T, whole.T, 3, axis=1) == [0.0, 0.0, 0.0]
    assert relative_errors(whole * float("nan"), whole, 3) == [float("inf")] * 3

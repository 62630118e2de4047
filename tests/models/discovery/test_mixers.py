"""Token mixers without softmax: found, and H and W' the same by other ways than impulses."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import InDouble, far, first_two, single_model, sweep, token_ids
from torch import Tensor, nn
from two_blocks import double, single

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.mixer import Behind
from duat_cli.models.discovery.kernels import behind_of
from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument import mixer
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path import factors
from duat_cli.models.value_path.factors import checked, operator_of
from duat_cli.zoo import tiny

# type, the block of the mixer, channels a head, channels that share a norm's scale, whether values are the stream's,
# whether what values leave as it is runs once, as the code broadcasts it
FORMS = [
    ("qwen3_next", 0, 12, 12, False, False),  # gated delta rule
    ("minimax", 1, 16, 64, False, True),  # decayed linear attention
    ("jamba", 0, 1, None, False, True),  # selective scan
    ("zamba2", 1, 8, 64, False, False),  # SSD behind a shared transformer; its attention reaches the stream through it
    ("zamba", 1, 1, None, False, False),  # selective scans of several heads behind one
    ("lfm2_moe", 0, 1, None, True, True),  # short convolution
    ("longformer", 1, 8, None, True, False),  # softmax over a window, whose output layer is another module's
    ("longt5", 1, 12, None, True, False),  # softmax over blocks of tokens
    ("nystromformer", 1, 8, None, True, False),  # softmax rows and a convolution of the values
    ("yoso", 1, 8, 8, True, False),  # hash collisions, each head's vector of unit length
    ("diffllama", 1, 32, 32, True, False),  # the difference of two softmax calls
    ("convbert", 1, 8, None, True, False),  # softmax rows beside a convolution whose kernel is dynamic
    ("xlstm", 1, 32, 32, True, False),  # matrix memory with exponential gates; each head's norm takes its mean away
    ("rwkv", 1, 1, None, True, False),  # a decayed mean of values that each token and the one before it make
    ("zaya", 1, 16, None, True, False),  # softmax rows, half of them over values of the token before
]


def rows_of(run: BlockRun) -> Tensor:
    return torch.cat([rows for _, rows in run.attention[0].rows.chunks()], dim=1)


@pytest.mark.parametrize(("model_type", "block", "width", "scaled", "affine", "once"), FORMS)
def test_w_is_what_the_frozen_block_does_with_each_unit_vector(
    model_type: str, block: int, width: int, scaled: int | None, affine: bool, once: bool
) -> None:
    """In float64: H, gates and O against the model's own code, value by value."""
    (model, structure), seen = double(model_type), []

    def listen(run: Any, step: Any, known: Any) -> None:
        form = run.parts.mixer
        if run.index != block:
            return
        assert (form.width, form.behind.scaled, form.affine, form.once) == (width, scaled, affine, once)
        operator = operator_of(run, known.factors, step)
        assert operator.own == (not affine)
        tokens, columns = operator.values.shape[1], operator.factors.width
        W = operator.matrix().dense()
        zero = torch.zeros_like(run.input)
        nothing = [torch.zeros_like(g[:1]) for g in step.given]
        base = known.factors.tap.read(run.replay(zero, nothing))[0]
        silent, ones = torch.zeros_like(run.attention[0].output), torch.ones_like(zero)
        passes = known.factors.tap.read(run.replay(ones, nothing, attention=silent))[0]
        passes = passes - known.factors.tap.read(run.replay(zero, nothing, attention=silent))[0]
        place = next((k for k, unit in enumerate(run.units) if unit.module is form.module), None)
        shown = range(0, tokens * columns, (tokens * columns // 12) | 1)
        units = torch.eye(tokens * columns, dtype=torch.float64)[shown].unflatten(-1, (tokens, columns))
        given = [g.expand(len(units), *g.shape[1:]) for g in nothing]
        if place is not None:
            given[place] = units[:, None]
        items = zero.expand(len(units), -1, -1) if place is not None else units
        images = known.factors.tap.read(run.replay(items, given)) - base
        if place is None:
            images = images - passes * units  # the stream itself passes through, in some scaled
        for column, image in zip(shown, images, strict=True):
            assert far(image.reshape(-1), W[:, column]) <= 1e-10, column
        assert far(rows_of(run) @ run.attention[0].value[0], run.attention[0].output[0].transpose(0, 1)) <= 1e-10
        assert checked(operator, run, known.factors.tap).error <= 1e-10
        assert step.terms.error <= 1e-10
        seen.append(run.index)

    with InDouble():
        sweep(model, token_ids(model), listen, structure=structure)
    assert seen == [block]


@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next"])
def test_impulses_some_at_a_time_show_the_same_rows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, structure), found = double(model_type), []

    def listen(run: Any, _step: Any, _known: Any) -> None:
        found.extend([rows_of(run)] if run.index == 0 else [])

    with InDouble():
        ids = token_ids(model, 9)
        for elements in (mixer.IMPULSES, 1, 1 << 9):
            monkeypatch.setattr(mixer, "IMPULSES", elements)
            sweep(model, ids, listen, structure=structure)
    whole, *parts = found
    assert len(parts) == 2
    assert max(far(part, whole) for part in parts) <= 1e-13


def test_code_that_runs_otherwise_on_one_token_is_refused() -> None:
    """RecurrentGemma takes a single token for a step of decoding."""
    model, structure = single("recurrent_gemma")
    match = "RecurrentBlock runs other operations on 1 token than when it was proved; give prompts of more tokens"
    with pytest.raises(UnsupportedModelError, match=match):
        sweep(model, token_ids(model, 1), lambda *_: None, structure=structure)
    sweep(model, token_ids(model, 2), lambda *_: None, structure=structure)


def test_more_heads_of_one_channel_than_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "CHANNEL_HEADS", 3)
    with pytest.raises(UnsupportedModelError, match="treats each of 4 channels by itself: measured up to 3 heads"):
        factors.choice_of_channels(torch.zeros(1, 4, 5, 1))
    assert factors.choice_of_channels(torch.zeros(1, 4, 5, 2)).shape == (4, 8, 2)


@pytest.mark.parametrize("width", [3, 4])
def test_a_norm_that_takes_the_mean_of_each_head_away_is_told_from_one_that_does_not(width: int) -> None:
    gate = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(4))

    def norm(items: Tensor) -> Tensor:
        return gate * nn.functional.layer_norm(items.unflatten(-1, (-1, width)), (width,)).flatten(-2)

    def root(items: Tensor) -> Tensor:
        return gate * nn.functional.rms_norm(items.unflatten(-1, (-1, width)), (width,)).flatten(-2)

    assert behind_of(norm, gate) == Behind(width, width)
    assert behind_of(root, gate) == Behind(width)
    assert behind_of(lambda items: gate * items, gate) == Behind(None)
    assert behind_of(lambda items: gate * items.tanh(), gate) is None


def test_h_of_a_gated_delta_rule_is_its_kernel_applied_to_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    code = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    own, asked = code.torch_chunk_gated_delta_rule, []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        asked.append((query, key, value, kwargs))
        return own(query, key, value, **kwargs)

    (model, structure), seen = single("qwen3_next"), []

    def listen(run: Any, _step: Any, _block: Any) -> None:
        if run.parts.mixer is None:
            return
        asked.clear()
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", kernel)
        run.recording.mixers[run.parts.mixer.module].code.run()  # the module's own pass
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", own)
        query, key, value, kwargs = asked[-1]
        tokens, heads = value.shape[1:3]
        identity = torch.eye(tokens)[None, :, None].expand(1, tokens, heads, tokens).contiguous()
        expected = own(query, key, identity, **kwargs)[0][0].permute(1, 0, 2)  # (heads, N, N)
        H = rows_of(run)
        assert far(H, expected) <= 1e-5
        assert not bool(H.triu(1).any())
        seen.append(run.index)

    sweep(model, token_ids(model), listen, structure=structure)
    assert seen == [0]


def test_h_of_a_short_convolution_is_its_weights() -> None:
    """y_i = C_i sum_k w_k (B x)_(i-k): H holds w and B, and C is the gate."""
    (model, structure), seen = single("lfm2_moe"), []

    def listen(run: Any, step: Any, block: Any) -> None:
        if run.parts.mixer is None:
            return
        conv, norm = run.parts.module.conv, run.parts.module.operator_norm
        B, C, _ = conv.in_proj(norm(run.input))[0].chunk(3, dim=-1)  # (N, M)
        weight = conv.conv.weight[:, 0]  # (M, taps)
        tokens = len(B)
        expected = torch.zeros(weight.shape[0], tokens, tokens)
        for tap in range(weight.shape[1]):
            for i in range(tap, tokens):
                expected[:, i, i - tap] = C[i] * weight[:, -1 - tap] * B[i - tap]
        operator = operator_of(run, block.factors, step)
        H = torch.cat([rows for _, rows in operator.rows.chunks()], dim=1)  # the gate of single channels is in it
        assert far(H, expected) <= 1e-5
        seen.append(run.index)

    sweep(model, token_ids(model), listen, structure=structure)
    assert seen == [0]


def test_tokens_beyond_one_chunk_and_other_prompts_have_the_same_form() -> None:
    """The kernel's loops take more operations for more tokens; its chunk holds 64."""
    (model, structure), seen = single("qwen3_next"), []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        assert checked(operator, run, block.factors.tap).error <= 1e-5
        assert step.terms.error <= 1e-5
        seen.append(run.index)

    sweep(model, token_ids(model, 70), listen, structure=structure)
    assert seen == [0, 1]


def test_a_mixer_that_is_not_linear_in_its_values_stays_a_unit() -> None:
    """A tanh behind the kernel."""
    model = first_two(single_model("minimax"))
    module = model.model.layers[1].self_attn
    module.norm.register_forward_hook(lambda _m, _a, output: torch.tanh(output))
    (block,) = [b for b in discover(model).blocks if b.parts.module is model.model.layers[1]]
    assert block.parts.mixer is None
    assert [type(unit).__name__ for unit in block.parts.mixing] == ["MiniMaxLightningAttention"]
    assert "no form that could be proved" in str(block.factors_reason)


def test_a_model_of_mixers_alone_is_read() -> None:
    built = tiny.build("mamba2")
    assert isinstance(built, tiny.TinyModel)
    structure = discover(built.model)
    assert structure.path == "frozen kernel"
    assert all(block.parts.mixer is not None and block.factors is not None for block in structure.blocks)


def test_attention_whose_values_come_of_a_gated_norm_reads_a_uat_term() -> None:
    """W' v is what attention gives in a plain pass of the model, its output gate included, v its own values."""
    (model, structure), seen, plain = double("axk2"), [], []
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn.o_proj")]
    with hooked(layers, after=lambda _module, _args, _kwargs, output: plain.append(output[0])), torch.no_grad():
        model(token_ids(model))

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        assert operator.own
        assert torch.equal(operator.values, run.attention[0].value[0])
        v = operator.values.transpose(0, 1).reshape(operator.values.shape[1], -1)  # (N, heads d)
        assert far(operator.matrix().apply(v), plain[run.index]) <= 1e-6  # its gate and norms compute in float32
        assert step.terms.error <= 1e-6
        seen.append(run.index)

    with InDouble():
        sweep(model, token_ids(model), listen, structure=structure)
    assert structure.uncovered == ()
    assert seen == [0, 1]


def test_what_rounding_may_hide_is_said_with_the_dtype() -> None:
    model, structure = single("mamba")
    assert structure.calls
    with pytest.raises(UnsupportedModelError, match=r"; in bfloat16 rounding may hide it, try --dtype float32$"):
        discover(model.to(torch.bfloat16))

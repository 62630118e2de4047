"""The gates of attention, measured through the frozen block, against the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import double_model, first_two, single_model, sweep, token_ids
from own_code import HEADS, PROMPTS, WIDTH, FeedForward, own
from torch import nn
from transformers import WavLMConfig, WavLMModel

from duat_cli.analysis.support import entry_of_type, examine
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.value_path.factors import operator_of
from duat_cli.models.value_path.operator import whole_rows
from duat_cli.models.value_path.probed import gate_of


def test_gates_are_the_sigmoids_of_the_models_own_gate_layer() -> None:
    model, seen = single_model("afmoe"), []

    def listen(run: Any, step: Any, block: Any) -> None:
        gate, error = gate_of(run, step.given)
        norm, attention = run.parts.module.input_layernorm, run.parts.module.self_attn
        own = torch.sigmoid(attention.gate_proj(norm(run.input)))[0]  # (N, heads d)
        assert torch.allclose(gate.transpose(0, 1).flatten(1), own, rtol=1e-5)
        assert error <= 1e-6
        operator = operator_of(run, block.factors, step)
        assert operator.gate is not None
        seen.append(run.index)

    sweep(model, token_ids(model), listen, None)
    assert seen == [0, 1, 2]


def test_values_and_outputs_that_are_parameters_alone_are_found() -> None:
    """XLNet's attention multiplies by V and O without layers, and takes tokens in front of the batch."""
    model, seen = first_two(double_model("xlnet")), []
    ids = token_ids(model)
    weights = model(input_ids=ids, output_attentions=True).attentions  # (1, heads, N, N) each

    def listen(run: Any, step: Any, block: Any) -> None:
        own = run.parts.module.rel_attn
        matrices = torch.einsum("mhd,khd->hkm", own.v, own.o)
        expected = torch.einsum("hij,hkm->ikjm", weights[run.index][0], matrices)
        dense = step.operator(run, block).matrix().dense()
        assert torch.allclose(dense, expected.reshape(dense.shape), rtol=1e-12, atol=1e-14)
        seen.append(run.index)

    sweep(model, ids, listen, None)
    assert seen == [0, 1]


@pytest.mark.parametrize("before", [False, True])
def test_torchs_own_attention_layer_is_read(before: bool) -> None:
    """torch.nn.MultiheadAttention holds V in one matrix with queries and keys, and multiplies by it in one function of
    torch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.ffn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), FeedForward()
            self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.self_attn(x, x, x, attn_mask=later, need_weights=False, is_causal=True)[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if before:
                x = x + self.attend(self.norm1(x))
                return x + self.ffn(self.norm2(x))
            x = self.norm1(x + self.attend(x))
            return self.norm2(x + self.ffn(x))

    model, seen = own(Layer).double(), []

    def listen(run: Any, step: Any, block: Any) -> None:
        layer = run.parts.module
        attention, x = layer.self_attn, run.input
        norm = layer.norm1
        scale = norm.weight / (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt() if before else 1 + 0 * x
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        read = norm(x) if before else x
        _, weights = attention(read, read, read, attn_mask=later, average_attn_weights=False)
        value = attention.in_proj_weight[2 * WIDTH :].unflatten(0, (HEADS, -1))
        matrices = torch.einsum("hdm,khd->hkm", value, attention.out_proj.weight.unflatten(1, (HEADS, -1)))
        expected = torch.einsum("hij,hkm,jm->ikjm", weights[0], matrices, scale[0])
        dense = step.operator(run, block).matrix().dense()
        if before:  # and the mean, which a LayerNorm subtracts
            expected = expected - expected.mean(-1, keepdim=True)
        assert torch.allclose(dense, expected.reshape(dense.shape), rtol=1e-12, atol=1e-14)
        seen.append(run.index)

    sweep(model, torch.tensor([PROMPTS[0]]), listen, None)
    assert seen == [0, 1]


@pytest.mark.parametrize("stable", [False, True])
def test_wavlm_is_read(stable: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    waves = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    near = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": stable}
    model = WavLMModel(WavLMConfig(**sizes, **waves, **near)).eval()
    entry = examine(model, like={"input_values": torch.randn(1, 100)})
    assert (entry.status, entry.parts) == ("exact", [])


def test_what_attention_adds_may_be_narrower_than_the_stream() -> None:
    """The first block of Fun-ASR's encoder takes vectors of 560 channels and gives some of another width."""
    entry = entry_of_type("fun_asr_nano_encoder")
    assert entry.status == "partly"
    assert "values reach the stream beside H" in entry.parts[0]


def test_a_gate_of_whole_heads_is_part_of_their_attention() -> None:
    model, seen = single_model("laguna"), []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        gate, _ = gate_of(run, step.given)
        H, own = (torch.cat([rows for _, rows in r.chunks()], dim=1) for r in (operator.rows, run.attention[0].rows))
        assert operator.gate is None
        assert torch.allclose(H, own * gate[..., :1])
        tokens = H.shape[1]
        even = operator.uniform(torch.ones(tokens, tokens, dtype=torch.bool))
        for one, without in ((operator, own), (even, torch.full_like(own, 1 / tokens))):
            assert one.ungated is not None
            assert torch.allclose(whole_rows(one.ungated), without)
            assert torch.allclose(whole_rows(one.rows), without * gate[..., :1])
        assert not torch.allclose(H, own, rtol=1e-2)
        seen.append(run.index)

    sweep(model, token_ids(model), listen, None)
    assert seen == [0, 1, 2]


def test_what_mixes_channels_is_no_gate() -> None:
    """A layer between the heads and the output projection."""
    model = single_model("llama")
    attention = model.model.layers[1].self_attn
    mixing = torch.linalg.qr(torch.randn(attention.o_proj.in_features, attention.o_proj.in_features))[0]

    def listen(run: Any, step: Any, block: Any) -> None:
        if run.index != 1:
            return
        handle = attention.o_proj.register_forward_pre_hook(lambda _m, args: (args[0] @ mixing,))
        try:
            with pytest.raises(UnsupportedModelError, match="no gate on channels"):
                gate_of(run, step.given)
        finally:
            handle.remove()

    sweep(model, token_ids(model), listen, None)

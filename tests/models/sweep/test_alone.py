"""Blocks that read more than their stream, in every way to hand it on: what the model computes is the same, and none
may be taken for a map of its stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_code import PROMPTS, Block, OwnConfig, OwnStack, own
from paging import in_parts, saved
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import duat_cli as duat
from duat_cli.analysis.session import Session
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.sweep import alone as module
from duat_cli.models.sweep.alone import has_own_code


class Reading(Block):
    """Adds the first thing that was left to what it attends to."""

    def forward(self, x: Tensor, left: Any = None) -> Tensor:
        own = self.attention(self.first(x))
        if isinstance(left, dict):
            more = left.setdefault("first", own)
        elif isinstance(left, Tensor):
            more = left
        else:
            more = own
        x = x + own + 0.5 * more
        return x + self.ffn(self.second(x))


class ByDictionary(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        left: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, left)
        return x


class EmbeddingsByDictionary(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        left = {"first": x}
        for layer in self.layers:
            x = layer(x, left)
        return x


class OnAModule(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.layers[0].first.__dict__)
        self.layers[0].first.__dict__.pop("first")
        return x


class ByArgument(OwnStack):
    """In another shape than the stream's."""

    def through(self, x: Tensor) -> Tensor:
        left = None
        for layer in self.layers:
            own = layer.attention(layer.first(x))
            left = own if left is None else left
            x = layer(x, left.unflatten(-1, (2, -1)).flatten(2)[:, None, :, :])
        return x


@pytest.mark.parametrize("stack", [ByDictionary, EmbeddingsByDictionary, OnAModule, ByArgument])
@pytest.mark.parametrize("verb", [duat.inspect, duat.verify, duat.prune_bound, duat.support])
def test_what_is_left_beside_the_stream_is_seen(stack: type[OwnStack], verb: Callable[..., Any]) -> None:
    class Flat(Reading):
        def forward(self, x: Tensor, left: Any = None) -> Tensor:
            return super().forward(x, left[:, 0] if isinstance(left, Tensor) and left.ndim == 4 else left)

    model = own(Flat, stack)
    if verb is duat.support:
        [entry] = duat.support(model).entries
        assert entry.status == "refused"
        assert "reads more of what is in front of it than the hidden states" in str(entry.reason)
        return
    with pytest.raises(UnsupportedModelError, match=r"layers\.[01] reads more of what is in front of it"):
        verb(model, prompts=PROMPTS)


def test_a_block_that_reads_its_stream_alone_passes() -> None:
    assert duat.verify(own(Reading), prompts=PROMPTS).certificate.exact


class Skipping(OwnStack):
    """Leaves the second of three layers out where a prompt has seven tokens."""

    def __init__(self, config: OwnConfig, block: type[nn.Module]) -> None:
        super().__init__(config, block, blocks=3)

    def through(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or x.shape[1] != 7:
                x = layer(x)
        return x


class Leaving(OwnStack):
    """Ends early there."""

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.shape[1] == 7:
                break
        return x


@pytest.mark.parametrize("stack", [Skipping, Leaving])
def test_blocks_that_do_not_always_run_have_no_numbers(stack: type[OwnStack]) -> None:
    assert duat.verify(own(stack=stack), prompts=PROMPTS[:1]).certificate.exact
    for verb in (duat.inspect, duat.verify, duat.attribute, duat.prune_bound, duat.compare):
        with pytest.raises(UnsupportedModelError, match="which of its blocks run"):
            verb(own(stack=stack), prompts=PROMPTS)


def test_the_code_of_libraries_is_known() -> None:
    model = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))
    assert not has_own_code(model)
    model.h[0].mlp = nn.Sequential(model.h[0].mlp)
    assert not has_own_code(model)
    model.h[0].mlp = Doubling()
    assert has_own_code(model)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, x)


@pytest.mark.parametrize(("model_type", "alone"), [("llama", True), ("gemma4_text", False)])
def test_weights_that_are_read_block_by_block(
    model_type: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were of code of one's own; Gemma 4's layers read embeddings of their own."""
    monkeypatch.setattr(module, "has_own_code", lambda stack: True)
    with in_parts(saved(model_type, tmp_path)) as loaded:
        session = Session(loaded, lambda *_: None, cache=False)
        if alone:
            assert len(session.structure.calls) > 1
            return
        with pytest.raises(UnsupportedModelError, match="reads more of what is in front of it"):
            _ = session.structure


class OwnT5Block(T5Block):
    """As code of its own has it."""


def test_a_decoder_may_read_its_encoder() -> None:
    shape = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **shape)).eval()
    for block in (*model.encoder.block, *model.decoder.block):
        block.__class__ = OwnT5Block
    assert has_own_code(model)
    for stack in ("decoder", "encoder"):
        assert duat.verify(model, prompts=[[5, 9, 12, 33]], stack=stack).certificate.exact

"""Models with code of their own: what is read as the usual make is, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from own_code import HEADS, PROMPTS, VOCABULARY, WIDTH, Attention, Block, FeedForward, OwnConfig, OwnStack, filled, own
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import duat_cli as duat
from duat_cli.errors import ForwardError, InputError, UnsupportedModelError


class InlineBlock(nn.Module):
    """The usual block, with its attention written in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.second, self.ffn = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))

    def feed(self, x: Tensor) -> Tensor:
        return self.ffn(x)  # type: ignore[no-any-return]


class InlineFeedForward(InlineBlock):
    """The FFN as well, but for its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = self.ffn.up, self.ffn.act, self.ffn.down
        self.ffn = nn.Identity()

    def feed(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


@functools.cache
def inspected(block: type[nn.Module]) -> Any:
    return duat.inspect(own(block), prompts=PROMPTS)


@functools.cache
def pruned(block: type[nn.Module]) -> Any:
    kinds = ["block", "attention", "head", "neuron"]
    return duat.prune_bound(own(block), prompts=PROMPTS, granularity=kinds, effort="quick")


@functools.cache
def attributed(block: type[nn.Module]) -> Any:
    return duat.attribute(own(block), prompts=PROMPTS[:1], measure=3).attribution[0]


def test_attention_in_the_block_s_own_forward_is_read_as_that_of_a_module() -> None:
    models = own(Block), own(InlineBlock)
    verified, compared, checked = (
        tuple(verb(model, prompts=PROMPTS) for model in models) for verb in (duat.verify, duat.compare, duat.check)
    )
    for pair in ((inspected(Block), inspected(InlineBlock)), verified, compared, checked):
        one, two = (report.model_dump(mode="json") for report in pair)
        for block in (*one.get("blocks", []), *two.get("blocks", [])):
            block.pop("range", None)  # of modules; what attention gives is none here
        assert two.get("blocks") == one.get("blocks")
        assert two.get("certificate") == one.get("certificate")
        assert two.get("skipped") == one.get("skipped")
    one, two = pruned(Block), pruned(InlineBlock)
    assert one.terms
    assert [t.model_copy(update={"module": ""}) for t in two.terms] == [
        t.model_copy(update={"module": ""}) for t in one.terms
    ]
    assert [plan.saves for plan in two.plans] == [plan.saves for plan in one.plans]
    assert attributed(InlineBlock) == attributed(Block)


class Chained(OwnStack):
    """Its blocks stand in a Sequential, which the stack calls, as those of timm do."""

    def __init__(self, config: OwnConfig, block: Any = Block, blocks: int = 2) -> None:
        super().__init__(config, block, blocks)
        self.layers = nn.Sequential(*self.layers)

    def through(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_blocks_in_a_sequential_are_read_as_those_in_a_list() -> None:
    kinds = ["block", "attention", "head", "neuron"]
    for verb, options in (
        (duat.inspect, {}), (duat.verify, {}), (duat.compare, {}), (duat.check, {}),
        (duat.prune_bound, {"granularity": kinds, "effort": "quick"}), (duat.attribute, {"measure": 3}),
    ):  # fmt: skip
        one, two = (
            verb(model, prompts=PROMPTS, **options).model_dump(mode="json") for model in (own(), own(stack=Chained))
        )
        assert {**one, "run": None} == {**two, "run": None}


def test_an_ffn_in_the_block_s_own_forward_has_its_neurons() -> None:
    one, two = inspected(Block), inspected(InlineFeedForward)
    assert [block.operator for block in two.blocks] == [block.operator for block in one.blocks]
    one, two = pruned(Block), pruned(InlineFeedForward)
    for a, b in zip(one.terms, two.terms, strict=True):
        assert (b.kind, b.block, b.index) == (a.kind, a.block, a.index)
        assert b.linearised == pytest.approx(a.linearised, rel=1e-5)
        assert b.measured == (None if a.measured is None else pytest.approx(a.measured, rel=1e-5))
    for a, b in zip(one.plans, two.plans, strict=True):
        assert (b.set, b.saves if b.granularity == "head" else None) == (
            a.set,
            a.saves if a.granularity == "head" else None,
        )


class InPlaceBlock(Block):
    """The usual block, which adds its FFN in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        x += self.ffn(self.second(x))
        return x


class CachingAttention(Attention):
    """Keeps values in a buffer, and attends to what stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, HEADS, 64, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.kept[:, :, : x.shape[1]] = v
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        rows = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.o((rows @ self.kept[:, :, : x.shape[1]]).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class CachingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = CachingAttention()


class CheckpointingBlock(Block):
    """Keeps little for a gradient, and runs again what it did not keep."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attention, self.first(x), use_reentrant=False)
        return x + checkpoint(self.ffn, self.second(x), use_reentrant=True)  # type: ignore[no-any-return]


def test_what_is_checkpointed_has_the_same_gradients() -> None:
    assert attributed(CheckpointingBlock) == attributed(Block)
    assert pruned(CheckpointingBlock).terms == pruned(Block).terms


@pytest.mark.parametrize("block", [InPlaceBlock, CachingBlock])
def test_what_is_written_in_place_changes_no_number(block: type[nn.Module]) -> None:
    one, two = inspected(Block), inspected(block)
    assert two.skipped == []
    for a, b in zip(one.blocks, two.blocks, strict=True):
        assert b.operator.frobenius_norm == pytest.approx(a.operator.frobenius_norm, rel=1e-5)
        assert b.operator.effective_heads == pytest.approx(a.operator.effective_heads, rel=1e-5)
    one, two = attributed(Block), attributed(block)
    assert [t.value for t in two.parts.tokens] == pytest.approx([t.value for t in one.parts.tokens], rel=1e-4, abs=1e-5)


class OneClass(OwnStack):
    """Blocks and head in one class, which gives a plain dictionary."""

    base_model_prefix = "body"

    def __init__(self, config: OwnConfig, block: type[nn.Module] = Block) -> None:
        super().__init__(config, block)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.body = nn.ModuleDict({"layers": self.layers})  # what `base_model` finds, and nobody calls

    def get_output_embeddings(self) -> None:  # type: ignore[override]
        return None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.lm_head(super().forward(input_ids).last_hidden_state)}


def test_a_class_that_holds_blocks_and_head_predicts_tokens() -> None:
    models = [own(), filled(OneClass(OwnConfig()))]
    one, two = pruned(Block), duat.prune_bound(models[1], prompts=PROMPTS, granularity="block", effort="quick")
    assert two.protocol.metric == "kl"
    assert [b.block_measured for b in two.blocks] == pytest.approx([b.block_measured for b in one.blocks], rel=1e-5)
    with pytest.raises(UnsupportedModelError, match="gives no hidden states of tokens"):
        duat.prune_bound(models[1], prompts=PROMPTS, metric="hidden", effort="quick")
    one, two = (duat.check(m, prompts=PROMPTS).behaviour for m in models)
    assert (two.predicts, two.loss_per_token) == ("next token", pytest.approx(one.loss_per_token, rel=1e-6))
    assert duat.attribute(models[1], prompts=PROMPTS[:1]).certificate.exact


class Labelling(OneClass):
    """Gives labels of tokens."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(WIDTH, 5, bias=False)


def test_labels_are_no_tokens() -> None:
    with pytest.raises(InputError, match="is no next-token model: it has no LM head"):
        duat.prune_bound(filled(Labelling(OwnConfig())), prompts=PROMPTS, metric="kl", effort="quick")


@dataclasses.dataclass
class Made:
    hidden: Tensor


class WrappingBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Made(super().forward(x))


class Unwrapping(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).hidden
        return x


def test_a_block_that_gives_no_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a block returns no hidden states of its input's shape"):
        duat.verify(own(WrappingBlock, Unwrapping), prompts=PROMPTS)


class Maskless(OwnStack):
    def forward(self, input_ids: Tensor) -> BaseModelOutput:  # type: ignore[override]
        return super().forward(input_ids)


class Failing(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        raise ValueError("on its own account")


def test_a_pass_that_takes_no_mask_is_given_none_and_one_that_fails_is_called_its_own() -> None:
    assert duat.verify(filled(Maskless(OwnConfig())), prompts=PROMPTS).certificate.exact
    with pytest.raises(ForwardError, match="fails: ValueError: on its own account; its code is not the libraries'"):
        duat.verify(own(stack=Failing), prompts=PROMPTS)


class PlacedNorm(nn.LayerNorm):
    """May be given the places of the tokens as well."""

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        return super().forward(x)


class PlacedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first = PlacedNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x, torch.arange(x.shape[1]).expand(x.shape[:2])))
        return x + self.ffn(self.second(x))


def test_a_norm_that_is_given_places_as_well_is_held_as_one_that_is_not() -> None:
    one, two = (inspected(block).model_dump(mode="json") for block in (Block, PlacedBlock))
    assert two["blocks"] == one["blocks"]
    assert two["certificate"] == one["certificate"]


class ValuesBeside(Attention):
    """H v + 0.3 v."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) + 0.3 * self.o(self.v(x))
        return made


class StreamBeside(Attention):
    """Adds the stream itself, as BLOOM's does."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) + x
        return made


@pytest.mark.parametrize(("attention", "noted"), [(ValuesBeside, True), (StreamBeside, False), (Attention, False)])
def test_a_path_beside_h_is_said(attention: type[nn.Module], noted: bool) -> None:
    class Other(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention()
            self.first = nn.Identity() if attention is StreamBeside else self.first

    said = [entry.why for entry in duat.inspect(own(Other), prompts=PROMPTS).skipped]
    assert said == ["values reach the stream beside H as well, token by token; W' leaves that path out"] * noted


class Renamed(OwnStack):
    main_input_name = "idx"

    def forward(self, idx: Tensor) -> BaseModelOutput:  # type: ignore[override]
        return super().forward(idx)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sin()


class GatedInline(InlineFeedForward):
    """As LLaDA's."""

    def feed(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * x.repeat(1, 1, 2)[..., :40])  # type: ignore[no-any-return]


def test_what_code_has_to_be_like_is_said() -> None:
    with pytest.raises(UnsupportedModelError, match="joins what 'GELU' gives with more of the stream: a gated FFN nee"):
        duat.verify(own(GatedInline), prompts=PROMPTS)
    with pytest.raises(UnsupportedModelError, match="its forward pass takes `idx`; name the argument for token ids"):
        duat.verify(filled(Renamed(OwnConfig())), prompts=PROMPTS)
    with pytest.raises(
        UnsupportedModelError, match=r"is not affine .*; no module is to blame: its own forward may call"
    ):
        duat.verify(own(Functional), prompts=PROMPTS)


class Short(OwnStack):
    """Has places for 32 tokens, of which its config says nothing."""

    def __init__(self, config: OwnConfig, block: type[nn.Module] = Block) -> None:
        super().__init__(config, block)
        self.places = nn.Embedding(32, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        return super().through(x + self.places(torch.arange(x.shape[1])))


def test_a_prompt_that_is_too_long_for_unstated_positions_is_said_to_be() -> None:
    model = own(stack=Short)
    assert duat.verify(model, prompts=PROMPTS).certificate.exact
    for verb in (duat.inspect, duat.verify, duat.compare, duat.check):
        with pytest.raises(ForwardError, match=r"on a prompt of 40 tokens: IndexError: .*; if it has no so many posit"):
            verb(model, prompts=[PROMPTS[0], PROMPTS[0] * 5])


class InPieces(OwnStack):
    """Attention and FFN of a layer in a list, with no module around them."""

    def __init__(self, config: OwnConfig, block: type[nn.Module] = Block) -> None:
        super().__init__(config, block)
        self.layers = nn.ModuleList(nn.ModuleList([one.attention, one.ffn]) for one in self.layers)

    def through(self, x: Tensor) -> Tensor:
        for attention, ffn in self.layers:
            x = x + attention(x)
            x = x + ffn(x)
        return x


def test_blocks_in_pieces_are_said_to_be() -> None:
    with pytest.raises(UnsupportedModelError, match=r"stands in lists of its own, with no module around .*: layers"):
        duat.verify(own(stack=InPieces), prompts=PROMPTS)

"""Models with code of their own: what is read as the usual make is, and what is refused."""

from __future__ import annotations

import pytest
from own_code import HEADS, PROMPTS, WIDTH, Block, FeedForward, own
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import duat_cli as duat


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


def test_attention_in_the_block_s_own_forward_is_read_as_that_of_a_module() -> None:
    models = [own(Block), own(InlineBlock)]
    for verb in (duat.inspect, duat.verify, duat.compare, duat.check):
        one, two = (verb(model, prompts=PROMPTS).model_dump(mode="json") for model in models)
        for block in (*one.get("blocks", []), *two.get("blocks", [])):
            block.pop("range", None)  # of modules; what attention gives is none here
        assert two.get("blocks") == one.get("blocks")
        assert two.get("certificate") == one.get("certificate")
        assert two.get("skipped") == one.get("skipped")
    kinds = ["block", "attention", "head", "neuron"]
    one, two = (duat.prune_bound(m, prompts=PROMPTS, granularity=kinds, effort="quick") for m in models)
    assert one.terms
    assert [t.model_copy(update={"module": ""}) for t in two.terms] == [
        t.model_copy(update={"module": ""}) for t in one.terms
    ]
    assert [plan.saves for plan in two.plans] == [plan.saves for plan in one.plans]
    one, two = (duat.attribute(m, prompts=PROMPTS[:1], measure=3).attribution[0].model_dump() for m in models)
    assert two == one


def test_an_ffn_in_the_block_s_own_forward_has_its_neurons() -> None:
    models = [own(Block), own(InlineFeedForward)]
    one, two = (duat.inspect(model, prompts=PROMPTS) for model in models)
    assert [block.operator for block in two.blocks] == [block.operator for block in one.blocks]
    one, two = (duat.prune_bound(m, prompts=PROMPTS, granularity=["head", "neuron"], effort="quick") for m in models)
    for a, b in zip(one.terms, two.terms, strict=True):
        assert (b.kind, b.block, b.index) == (a.kind, a.block, a.index)
        assert b.linearised == pytest.approx(a.linearised, rel=1e-5)
        assert b.measured == (None if a.measured is None else pytest.approx(a.measured, rel=1e-5))
    for a, b in zip(one.plans, two.plans, strict=True):
        assert (b.set, b.saves if b.granularity == "head" else None) == (
            a.set,
            a.saves if a.granularity == "head" else None,
        )

"""Squashing functions inside attention: those that multiply are held as gates, those that add are refused. How far a
block in half precision may be off."""

from __future__ import annotations

import pytest
import torch
from helpers import InDouble, Wiring, dense_blocks, far, first_two, logits_of, sweep
from own_code import HEADS, PROMPTS, WIDTH, Attention, Block, own
from torch import Tensor, nn

import duat_cli as duat
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.modality import probe_ids
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.value_path.factors import operator_of
from duat_cli.zoo.tiny import tiny_model


class Gated(Attention):
    """With biases on its values and on its gate, which is made behind H V; behind a norm with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        H = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        given = (H @ self.values(v, x)).transpose(1, 2).flatten(2)
        return self.o(self.behind(given, x))  # type: ignore[no-any-return]

    def squashed(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x))

    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v

    def behind(self, given: Tensor, x: Tensor) -> Tensor:
        return given * self.squashed(x)


class InPlace(Gated):
    def behind(self, given: Tensor, x: Tensor) -> Tensor:
        return given.mul_(self.squashed(x))


class MadeInFront(Gated):
    def values(self, v: Tensor, x: Tensor) -> Tensor:
        self.made = self.squashed(x)
        return v

    def behind(self, given: Tensor, x: Tensor) -> Tensor:
        return given * self.made


class InFront(Gated):
    """Gates its values."""

    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v * self.squashed(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def behind(self, given: Tensor, x: Tensor) -> Tensor:
        return given


class AddsBehind(Gated):
    def behind(self, given: Tensor, x: Tensor) -> Tensor:
        return given + self.squashed(x)


class AddsToValues(InFront):
    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v + self.squashed(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)


class SquashesValues(InFront):
    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v.tanh()


class GatesAndAdds(Gated):
    """What is added stands in front of a gate, as a bias may."""

    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v + v.tanh()


def block_with(attention: type[Attention]) -> type[Block]:
    class With(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention()

    return With


@pytest.mark.parametrize("attention", [Gated, InPlace, MadeInFront, InFront])
def test_a_gate_on_values_with_a_bias_is_held(attention: type[Attention]) -> None:
    """In float64 W' is the Jacobian of what attention adds, and the parts of a logit sum to the model's own."""
    model, ids, seen = own(block_with(attention)).double(), torch.tensor(PROMPTS[:1]), []
    expected = dense_blocks(model, ids, Wiring("model.layers", "attention"))

    def listen(run: object, step: object, block: object) -> None:
        operator = operator_of(run, block.factors, step)  # type: ignore[attr-defined,arg-type]
        seen.append(far(operator.matrix().dense(), expected[len(seen)].W))

    if attention is not InFront:  # values that are gated channel by channel are no sum of Kronecker products
        with InDouble():
            sweep(model, ids, listen)
        assert len(seen) == 2
        assert max(seen) <= 1e-10
    report = duat.attribute(model, prompts=PROMPTS[:1])
    assert report.certificate.exact
    assert report.attribution[0].logit == pytest.approx(float(logits_of(model, ids)[-1].max()), rel=1e-10)


@pytest.mark.parametrize("attention", [AddsBehind, AddsToValues, SquashesValues, GatesAndAdds])
def test_what_adds_is_no_gate(attention: type[Attention]) -> None:
    with pytest.raises(UnsupportedModelError, match="adds to the stream; it gates nothing"):
        duat.verify(own(block_with(attention)), prompts=PROMPTS)


def test_a_stream_in_float32_between_blocks_in_half_precision_is_as_exact_as_those() -> None:
    """ZAYA keeps the sum of its stream in float32; its blocks round as their weights do."""
    structure = discover(first_two(tiny_model("zaya").bfloat16()))
    first = structure.blocks[0].parts.module
    assert {one.dtype for one in first.parameters()} == {torch.bfloat16}
    seen = list[torch.dtype]()
    first.register_forward_pre_hook(lambda _m, args: seen.append(args[0].dtype))
    run_stack(structure.stack, probe_ids(structure.stack, 9))
    assert seen == [torch.float32]


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "deepseek_v4"])
def test_gates_are_held_in_half_precision_too(model_type: str) -> None:
    """Where rounding is as large as what they leave of an affine map: what they do is seen, not only that it fails."""
    gated = [block.parts.gated for block in discover(tiny_model(model_type).bfloat16()).blocks]
    assert gated == [model_type == "deepseek_v4", True, model_type == "deepseek_v4"]

"""Activation functions that blocks hold as attributes: read as modules are, and in their place in a plain pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_code import HEADS, PROMPTS, WIDTH, Block, FeedForward, OwnStack, own
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation

import duat_cli.api.models as duat
from duat_cli.models.block.activations import Activation, functions_again, put_activations


class OfTorch(nn.TransformerEncoderLayer):
    """torch's own block, causal."""

    def __init__(self, activation: Any = "gelu", *, first: bool = True, norm_first: bool = True) -> None:
        super().__init__(WIDTH, HEADS, 40, dropout=0.0, activation=activation, batch_first=first, norm_first=norm_first)
        self.axis = int(first)  # of the tokens

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = torch.full((x.shape[self.axis],) * 2, -torch.inf, dtype=x.dtype).triu(1)
        return super().forward(x, src_mask=mask, is_causal=True)


class Turned(OwnStack):
    """Its blocks take tokens in front of the batch."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(x.transpose(0, 1)).transpose(0, 1)


class Functional(FeedForward):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        del self.act  # a module
        self.act = function  # type: ignore[assignment]


class InBlock(Block):
    """The layers of the FFN are called by the block, their activation too."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ffn = Functional(function)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.ffn.down(self.ffn.act(self.ffn.up(self.second(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_torchs_own_block_is_read(first: bool, norm_first: bool) -> None:
    block = functools.partial(OfTorch, first=first, norm_first=norm_first)
    model = own(block, OwnStack if first else Turned)
    assert duat.inspect(model, prompts=PROMPTS).certificate.exact
    report = duat.prune_bound(model, prompts=PROMPTS[:1], granularity=["neuron", "ffn"], effort="quick", measure=6)
    before, measured = log_probabilities(model), [term for term in report.terms if term.measured is not None]
    assert {term.kind for term in measured} == {"neuron", "ffn"}
    for term in (one for one in measured if one.kind == "neuron"):
        layer = model.model.get_submodule(term.module)
        assert layer is model.model.layers[term.block].linear2
        gone = torch.tensor([term.index])
        with layer.register_forward_pre_hook(lambda _layer, args, gone=gone: (args[0].index_fill(-1, gone, 0),)):
            after = log_probabilities(model)
        kl = (before.exp() * (before - after)).sum(-1).mean()
        assert term.measured == pytest.approx(float(kl), rel=1e-3, abs=1e-7)


def log_probabilities(model: Any) -> Tensor:
    return torch.as_tensor(model(torch.tensor(PROMPTS[:1])).logits[0]).double().log_softmax(-1)


@pytest.mark.parametrize("function", [functional.gelu, functools.partial(functional.gelu, approximate="none")])
def test_the_numbers_are_those_of_a_module(function: Callable[[Tensor], Tensor]) -> None:
    reports = [
        duat.inspect(own(functools.partial(InBlock, act)), prompts=PROMPTS, terms=True).model_dump(mode="json")
        for act in (function, nn.GELU())
    ]
    assert reports[0]["blocks"] == reports[1]["blocks"]
    assert reports[0]["certificate"] == reports[1]["certificate"]


def test_a_callers_model_is_left_as_it_is() -> None:
    model = own(functools.partial(InBlock, functional.silu))
    duat.verify(model, prompts=PROMPTS)
    assert all(layer.ffn.act is functional.silu for layer in model.model.layers)


class Asking(InBlock):
    """Asks which function it has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.ffn.act is functional.relu else 1.0)


def test_code_that_asks_for_its_function_is_found_to_run_otherwise() -> None:
    """The pass without instruments is the model's own, so the sum, which is another's, is not certified."""
    certificate = duat.verify(own(functools.partial(Asking, functional.relu)), prompts=PROMPTS).certificate
    assert certificate.plain_error > certificate.tolerance
    assert not certificate.exact


def test_functions_stand_again_and_only_those_of_torch_are_exchanged() -> None:
    block = InBlock(functional.relu)
    block.note, block.other = functional.softmax, str.upper  # type: ignore[assignment]
    block.alone = GELUActivation()  # transformers', which holds a function and nothing else
    put_activations([block])
    assert block.alone.act is functional.gelu
    stand_in = block.ffn.act
    assert isinstance(stand_in, Activation)
    assert block.note is functional.softmax
    assert block.other is str.upper
    put_activations([block])
    with functions_again([block]):
        assert block.ffn.act is functional.relu
    assert block.ffn.act is stand_in
    assert torch.equal(stand_in(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))

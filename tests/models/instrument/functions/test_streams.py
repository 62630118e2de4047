"""Modules that weigh the streams of a token are told from others by what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duat_cli.models.block.norms import NormForm, recognise
from duat_cli.models.instrument.functions.streams import streams_weighed
from duat_cli.models.instrument.interception import WeightFreezer
from duat_cli.models.instrument.tracing import Event

STREAMS, WIDTH = 3, 8


class Rms(nn.Module):
    """Over groups of channels."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        each = x.unflatten(-1, (self.groups, -1))
        return (each * (each.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)


class Apart(nn.Module):
    """Streams on an axis of their own, with weights that are made by softmax and sigmoid (hyper-connections)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.make = Rms(), nn.Linear(STREAMS * WIDTH, STREAMS * (STREAMS + 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.make(self.norm(x.flatten(2)))
        mix = made[..., STREAMS:].unflatten(-1, (STREAMS, STREAMS)).softmax(dim=-1)
        pre = made[..., :STREAMS].sigmoid()
        return pre, mix @ x, (pre[..., None] * x).sum(2)


class Beside(nn.Module):
    """Streams side by side behind a norm of each, every channel with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.make = Rms(STREAMS), nn.Linear(STREAMS * WIDTH, STREAMS * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(x)
        weights = torch.sigmoid(self.make(normed))
        return (weights * normed).unflatten(-1, (STREAMS, WIDTH)).mean(2), x, weights[..., :STREAMS]


class Ffn(nn.Module):
    """Gated, with its gate as a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(STREAMS * WIDTH, STREAMS * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = nn.functional.silu(self.gate(x))
        return self.down(gate * self.up(x)), gate


class Gate(nn.Module):
    """Of one stream, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(STREAMS * WIDTH, STREAMS * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.make(x).sigmoid()
        return gate * x, gate


class Router(nn.Module):
    """Its logits, and the weights made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(STREAMS * WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.make(x)
        return logits, logits.softmax(dim=-1)


class Squared(Beside):
    """Streams that are not weighed but squared."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, stream, weights = super().forward(x)
        return one * one, stream, weights


def weighed(module: nn.Module, *shape: int) -> int:
    torch.manual_seed(0)
    x = torch.randn(1, 5, *shape, dtype=torch.float64)
    event = Event(module.double(), (x,), {}, module(x))
    norms: dict[nn.Module, NormForm] = {}
    for norm in (inner for inner in module.modules() if isinstance(inner, Rms)):
        at = x.flatten(2)
        form = recognise(norm, at, norm(at))
        assert form is not None
        norms[norm] = form
    return streams_weighed(event, norms)


def test_streams_on_an_axis_and_streams_side_by_side_are_counted() -> None:
    assert weighed(Apart(), STREAMS, WIDTH) == STREAMS
    assert weighed(Beside(), STREAMS * WIDTH) == STREAMS


@pytest.mark.parametrize("make", [Ffn, Gate, Router, Squared])
def test_what_weighs_no_streams(make: Callable[[], nn.Module]) -> None:
    assert weighed(make(), STREAMS * WIDTH) == 0


def test_held_weights_are_those_of_the_first_run_for_every_item_and_prompt() -> None:
    torch.manual_seed(0)
    module, x = Apart(), torch.randn(2, 5, STREAMS, WIDTH)  # two prompts
    weights: list[Tensor] = []
    inside = [False]

    def run(z: Tensor, *, held: bool) -> Any:
        with WeightFreezer(weights, held=held, apart=lambda: inside[0]):
            return module(z)

    pre, mixed, one = run(x, held=False)
    assert [tuple(each.shape) for each in weights] == [(2, 5, STREAMS, STREAMS), (2, 5, STREAMS)]
    again = run(torch.cat([x, 3 * x]), held=True)  # two items of both
    for got, want in zip(again, (torch.cat([pre, pre]), torch.cat([mixed, 3 * mixed]), torch.cat([one, 3 * one])),
                         strict=True):  # fmt: skip
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    inside[0] = True
    assert not torch.allclose(run(x.flip(1), held=True)[0], pre)
    assert len(weights) == 2


class InPlace(Apart):
    """Writes to its weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.make(x.flatten(2))[..., :STREAMS].sigmoid()
        weights *= 3
        return weights, weights[..., None] * x, (weights[..., None] * x).sum(2)


def test_what_is_held_is_what_was_made_before_the_model_wrote_to_it() -> None:
    torch.manual_seed(0)
    module, x, weights = InPlace(), torch.randn(1, 5, STREAMS, WIDTH), list[Tensor]()
    outputs = []
    with torch.no_grad():
        for held in (False, True, True):
            with WeightFreezer(weights, held=held, apart=lambda: False):
                outputs.append(module(x))
    assert all(torch.equal(one, other) for later in outputs[1:] for one, other in zip(outputs[0], later, strict=True))

"""Why a block is refused: the module that it is not affine by, or what else its own code does."""

from __future__ import annotations

import pytest
import torch
from own_code import PROMPTS, Block, own
from torch import Tensor, nn

import duat_cli as duat
from duat_cli.analysis.support import entry_of_type
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.blame import not_affine_in

SAID = {
    "pegasus_x": "be so in self_attn (PegasusXGlobalLocalAttention), whose output is more than held weights on values",
    "prophetnet": "be so in self_attn (ProphetNetNgramSelfAttention), whose output is more than held weights on values",
    "timesfm": "be so in mlp (TimesFmMLP), by what stands between its layers and is no module",
}


@pytest.mark.parametrize("model_type", SAID)
def test_the_module_is_named(model_type: str) -> None:
    entry = entry_of_type(model_type)
    assert SAID[model_type] in (entry.reason or "; ".join(entry.parts))


def test_the_innermost_is_named_and_none_where_all_are_affine() -> None:
    x, r = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    items = torch.zeros_like(x), x, r, x + r
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block = nn.Sequential(nn.Linear(4, 4), inner)
    assert (
        not_affine_in(block, (), [lambda one=one: block(one) for one in items]) == "; it ceases to be so in 1.1 (Tanh)"
    )
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not_affine_in(plain, (), [lambda one=one: plain(one) for one in items]) == ""


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * torch.randn_like(x)


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (1 + 0.01 * (self.calls % 3)) * self.attention(self.first(x))  # type: ignore[no-any-return]


class WritingToItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.first(x))
        return x + self.ffn(self.second(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Drawing, "called twice with one input it gives two results: it draws at random, or counts its calls"),
        (Counting, "called twice with one input it gives two results: it draws at random, or counts its calls"),
        (WritingToItsInput, "it writes to its own input in place, so that what it was given is lost"),
    ],
)
def test_what_a_call_does_beside_its_result_is_named(block: type[Block], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        duat.verify(own(block), prompts=PROMPTS)

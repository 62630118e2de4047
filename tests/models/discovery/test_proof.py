"""The module that a refused block is not affine by, on models whose code shows which one it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from duat_cli.analysis.support import entry_of_type
from duat_cli.models.discovery.proof import not_affine_in

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

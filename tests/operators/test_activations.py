"""Known activations: their turning points by differentiation, their maxima against a fine grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.activations import ACT2FN

from duat_cli.operators.activations import KNOWN, Activation, recognise

GRID = torch.linspace(-60.0, 60.0, 480_001, dtype=torch.float64)


@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k.name)
def test_it_turns_at_its_turns_and_nowhere_else(known: Activation) -> None:
    steps = known(GRID).diff()
    moving = (steps.abs() > 1e-13).nonzero()[:, 0]
    signs = steps[moving].sign()
    turns = GRID[moving[1:][signs[1:] != signs[:-1]]].tolist()
    assert turns == pytest.approx(list(known.turns), abs=1e-3)
    for turn in known.turns:
        t = torch.tensor([turn], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(known(t).sum(), t)
        assert abs(float(slope)) < 1e-7


@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k.name)
def test_below_identity_is_what_it_says(known: Activation) -> None:
    below = bool((known(GRID).abs() <= GRID.abs() * (1 + 1e-12)).all())
    assert below == known.below_identity


@given(st.sampled_from(KNOWN), st.floats(-30, 30), st.floats(0, 20))
def test_the_maximum_is_the_one_a_fine_grid_finds(known: Activation, low: float, length: float) -> None:
    ends = torch.tensor([low], dtype=torch.float64), torch.tensor([low + length], dtype=torch.float64)
    inside = known(torch.linspace(low, low + length, 20_001, dtype=torch.float64)).abs().max()
    bound = known.maximum(*ends)
    assert float(bound) >= float(inside) * (1 - 1e-12)
    assert float(bound) <= float(inside) + 1e-6 * max(1.0, float(inside))


NAMES = {
    "gelu": "gelu", "gelu_new": "gelu (tanh)", "gelu_pytorch_tanh": "gelu (tanh)", "gelu_fast": "gelu (tanh)",
    "gelu_python": "gelu", "gelu_accurate": "gelu (tanh)", "silu": "silu", "swish": "silu", "relu": "relu",
    "relu2": "relu squared", "quick_gelu": "quick gelu", "tanh": "tanh", "mish": "mish", "relu6": "relu6",
    "gelu_10": "gelu, clipped at 10", "sigmoid": "sigmoid", "linear": "identity", "hardswish": "hardswish",
    "leaky_relu": "leaky relu", "laplace": None, "sqrtsoftplus": None,
}  # fmt: skip


@pytest.mark.parametrize("name", list(NAMES))
def test_models_own_activations_are_recognised_by_their_values(name: str) -> None:
    t = torch.linspace(-40, 40, 4001)
    found = recognise(t, ACT2FN[name](t), None, 3e-5)
    assert (found.name if found else None) == NAMES[name]


def test_a_gated_product_is_recognised_and_a_near_miss_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    t, factor = 15 * torch.randn(2, 5000, generator=generator)
    found = recognise(t, functional.silu(t) * factor, factor, 3e-5)
    assert found is not None
    assert found.name == "silu"
    assert recognise(t, t * torch.sigmoid(1.01 * t) * factor, factor, 3e-5) is None
    assert recognise(t, functional.silu(t.clamp(max=7.0)) * factor, factor, 3e-5) is None


def test_values_that_do_not_reach_far_prove_nothing() -> None:
    t = torch.linspace(-5, 5, 1001)
    assert recognise(t, torch.relu(t), None, 3e-5) is None
    assert recognise(t[:0], t[:0], None, 3e-5) is None

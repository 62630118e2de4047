"""Certified maxima over the ball against search, and against closed forms where there are some."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from duat_cli.operators import bounds as bounds_module
from duat_cli.operators.activations import KNOWN, Activation
from duat_cli.operators.bounds import (
    Ball,
    ball_maximum,
    gated_maximum,
    head_maximum,
    plain_maximum,
    product_maximum,
    row_lengths,
    spectral_limit,
    sum_maximum,
)

ACTIVATIONS = {known.name: known for known in KNOWN}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ascend(value: Callable[[Tensor], Tensor], count: int, width: int, radius: float, seed: int) -> Tensor:
    """Largest `value` (…, count) found over the ball, by projected ascent from 32 starts: u (32, count, width)."""
    u = draw(32, count, width, seed=seed)
    u = (radius * u / u.norm(dim=-1, keepdim=True)).requires_grad_()
    best = torch.zeros(count, dtype=torch.float64)
    for step in range(150):
        found = value(u)
        best = torch.maximum(best, found.detach().amax(0))
        (slope,) = torch.autograd.grad(found.sum(), u)
        slope = slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        moved = u.detach() + 0.3 * radius * 0.96**step * slope
        length = moved.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        u = (moved * (radius / length).clamp_max(1.0)).requires_grad_()
    return best


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu (tanh)", "relu", "quick gelu", "tanh", "sigmoid", "selu"])
@pytest.mark.parametrize("size", [0.05, 0.4, 3.0])
@pytest.mark.parametrize("offset", [0.0, 0.7])
def test_a_gated_neuron_is_never_above_its_bound_and_comes_near(name: str, size: float, offset: float) -> None:
    n, width, radius = 12, 9, 3.0
    a, b = size * draw(2, n, width, seed=1)
    b[0], b[1] = a[0], -a[1]  # aligned with the gate
    c, d = offset * draw(2, n, seed=2)
    activation = ACTIVATIONS[name]
    bound = gated_maximum(a, b, c, d, radius, activation)
    found = search_plane(a, b, c, d, radius, activation)
    assert bool((found <= bound).all())
    assert bool((found >= 0.99 * bound - 2e-3 * bound.max()).all())
    risen = ascend(lambda u: (activation((u * a).sum(-1) + c) * ((u * b).sum(-1) + d)).abs(), n, width, radius, seed=3)
    assert bool((risen <= bound).all())


def search_plane(a: Tensor, b: Tensor, c: Tensor, d: Tensor, radius: float, activation: Activation) -> Tensor:
    """Largest |σ(a·u + c)(b·u + d)| on a polar grid of the plane that a and b span, (n,)."""
    radii = torch.linspace(0, radius, 60, dtype=torch.float64)[:, None]
    angles = torch.linspace(0, 2 * torch.pi, 361, dtype=torch.float64)
    disc = torch.stack([radii * angles.cos(), radii * angles.sin()], dim=-1).reshape(-1, 2)
    basis, _ = torch.linalg.qr(torch.stack([a, b], dim=-1))  # (n, width, 2)
    u = torch.einsum("gk,nmk->ngm", disc, basis)
    gate, other = torch.einsum("ngm,nm->ng", u, a), torch.einsum("ngm,nm->ng", u, b)
    return (activation(gate + c[:, None]) * (other + d[:, None])).abs().amax(dim=1)


def test_the_bound_of_large_gated_neurons_is_the_closed_form() -> None:
    """silu(t) nears t: M (|a||b| + |a·b|) / 2, attained."""
    a, b = 40 * draw(2, 20, 16, seed=4)
    zero = torch.zeros(20, dtype=torch.float64)
    closed = product_maximum(a, b, 4.0)
    bound = gated_maximum(a, b, zero, zero, 4.0, ACTIVATIONS["silu"])
    assert bool((bound <= closed * (1 + 1e-8)).all())
    assert bool((bound >= closed * 0.99).all())


@given(st.integers(0, 10_000))
def test_the_product_form_is_the_largest_eigenvalue(seed: int) -> None:
    a, b = draw(2, 1, 6, seed=seed)
    symmetric = (torch.outer(a[0], b[0]) + torch.outer(b[0], a[0])) / 2
    largest = torch.linalg.eigvalsh(symmetric).abs().max()
    assert float(product_maximum(a, b, 1.7)) == pytest.approx(1.7**2 * float(largest), rel=1e-12)


def test_degenerate_neurons() -> None:
    zero = torch.zeros(2, 5, dtype=torch.float64)
    offsets = torch.tensor([0.5, 0.0], dtype=torch.float64)
    silu = ACTIVATIONS["silu"]
    gated = gated_maximum(zero, torch.ones_like(zero), offsets, offsets, 2.0, silu)
    expected = functional.silu(offsets) * (offsets + 2.0 * 5**0.5)
    assert torch.allclose(gated, expected, rtol=1e-8)
    assert torch.allclose(plain_maximum(zero, offsets, 2.0, silu), functional.silu(offsets), rtol=1e-8)
    assert gated_maximum(zero[:0], zero[:0], offsets[:0], offsets[:0], 2.0, silu).shape == (0,)


@pytest.mark.parametrize("activation", KNOWN, ids=lambda k: k.name)
def test_a_plain_neuron_attains_its_bound(activation: Activation) -> None:
    a, c = draw(10, 7, seed=5), draw(10, seed=6)
    bound = plain_maximum(a, c, 2.5, activation)
    found = ascend(lambda u: activation((u * a).sum(-1) + c).abs(), 10, 7, 2.5, seed=7)
    assert bool((found <= bound).all())
    assert bool((found >= 0.99 * bound).all())


@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 30.0])
def test_an_affine_map_of_the_ball(size: float) -> None:
    """Offsets from none to overwhelming; the dual bound is attained."""
    maps, radius = draw(6, 8, 5, seed=8), 1.3  # u (8) to (5)
    offset = size * draw(6, 5, seed=9)
    left, singular, _ = torch.linalg.svd(maps.mT, full_matrices=False)
    along = torch.einsum("hmr,hm->hr", left, offset)
    bound = ball_maximum(singular, along, torch.zeros(6, dtype=torch.float64), radius)
    found = ascend(lambda u: (torch.einsum("xhm,hmk->xhk", u, maps) + offset).norm(dim=-1), 6, 8, radius, seed=10)
    assert bool((found <= bound).all())
    assert bool((found >= bound * (1 - 1e-3)).all())


def test_the_hard_case_of_an_offset_across_the_largest_direction() -> None:
    """k has no part along σ_1: max² = σ_1² (R² - w²) + …, attained with a part along σ_1 all the same."""
    singular = torch.tensor([2.0, 1.0], dtype=torch.float64)
    along = torch.tensor([0.0, 0.3], dtype=torch.float64)
    angle = torch.linspace(0, torch.pi, 200_001, dtype=torch.float64)
    best = ((2 * angle.sin()) ** 2 + (angle.cos() + 0.3) ** 2).sqrt().max()
    bound = ball_maximum(singular, along, torch.tensor(0.0, dtype=torch.float64), 1.0)
    assert float(bound) == pytest.approx(float(best), rel=1e-6)
    assert float(bound) >= float(best)


def test_zero_maps() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert float(ball_maximum(zero, zero, torch.tensor(0.0, dtype=torch.float64), 1.0)) <= 1e-12
    offset = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    value = float(ball_maximum(zero, offset, torch.tensor(12.0, dtype=torch.float64), 1.0))
    assert value == pytest.approx(13.0)


def test_heads_over_the_ball() -> None:
    value, output = draw(4, 10, 3, seed=11), draw(4, 3, 12, seed=12)
    zero = torch.zeros(4, 3, dtype=torch.float64)
    dense = 1.9 * torch.linalg.matrix_norm(value @ output, 2)
    assert torch.allclose(head_maximum(value, output, zero, 1.9), dense, rtol=1e-8)
    offset = draw(4, 3, seed=13)
    bound = head_maximum(value, output, offset, 1.9)
    found = ascend(
        lambda u: ((torch.einsum("xhm,hmd->xhd", u, value) + offset)[..., None, :] @ output)[..., 0, :].norm(dim=-1),
        4, 10, 1.9, seed=14,
    )  # fmt: skip
    assert bool((found <= bound).all())
    assert bool((found >= 0.999 * bound).all())


@pytest.mark.parametrize("centered", [False, True])
def test_a_ball_moves_weights_as_its_norm_moves_tokens(centered: bool) -> None:
    ball = Ball(draw(6, seed=15), draw(6, seed=16), centered, 2.0)
    weights, bias = draw(5, 6, seed=17), draw(5, seed=18)
    u = draw(6, seed=19)
    u = u - u.mean() if centered else u
    y = ball.gain * u + ball.bias
    assert torch.allclose(ball.directions(weights) @ u + ball.offsets(weights, bias), weights @ y + bias)


@pytest.mark.parametrize("biased", [False, True])
def test_the_largest_output_of_a_norm(biased: bool) -> None:
    gain, bias = draw(8, seed=20), draw(8, seed=21)
    ball = Ball(gain, bias if biased else None, False, 2.0)
    found = ascend(lambda u: (u * gain + (bias if biased else 0)).norm(dim=-1), 1, 8, 2.0, seed=22)
    assert float(found) <= ball.largest() <= float(found) * 1.001
    if not biased:
        assert ball.largest() == pytest.approx(2.0 * float(gain.abs().max()))
    assert ball.largest_difference() == pytest.approx(4.0 * float(gain.abs().max()))


def test_sums_of_columns() -> None:
    columns, sizes = draw(9, 5, seed=23), draw(9, seed=24).abs()
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 9)
    largest = ((signs * sizes) @ columns).norm(dim=-1).max()
    assert float(largest) <= sum_maximum(sizes, columns)
    exact = float(torch.linalg.matrix_norm(columns, 2))
    assert spectral_limit(columns) == pytest.approx(exact)
    assert spectral_limit(columns.T) == pytest.approx(exact)
    assert spectral_limit(columns.repeat(400, 400)) >= 400 * exact * (1 - 1e-9)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (7, 7)])
def test_what_is_made_of_some_rows_at_a_time_is_that_of_all(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, scale = draw(*shape, seed=25), draw(shape[1], seed=26)
    whole = spectral_limit(matrix, lambda rows: rows * scale), row_lengths(matrix, lambda rows: rows * scale)
    assert whole[0] == pytest.approx(float(torch.linalg.matrix_norm(matrix * scale, 2)))
    assert torch.equal(whole[1], (matrix * scale).norm(dim=1))
    monkeypatch.setattr(bounds_module, "ROWS", 2)
    assert spectral_limit(matrix, lambda rows: rows * scale) == pytest.approx(whole[0], rel=1e-12)
    monkeypatch.setattr(bounds_module, "SPECTRAL_SIDE", 1)
    assert spectral_limit(matrix.float(), lambda rows: rows.double() * scale) == pytest.approx(
        float((matrix.float() * scale).norm()), rel=1e-6
    )

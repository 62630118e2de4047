"""The ball a norm's output lies in, for norms of every making; and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import far, single_model
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.norm_scale import ball_of
from duat_cli.operators.bounds import Ball

NORMS = {
    "llama": "model.layers.0.input_layernorm",
    "gemma2": "model.layers.0.post_feedforward_layernorm",  # gain 1 + weight
    "gpt2": "transformer.h.0.ln_1",
    "cohere": "model.layers.0.input_layernorm",
    "nemotron": "model.layers.0.input_layernorm",  # LayerNorm, gain 1 + weight
    "t5": "encoder.block.0.layer.0.layer_norm",
}


def inside(ball: Ball, y: Tensor) -> Tensor:
    """|u| / radius of outputs y: u = (y - β) / g."""
    u = (y.double() - (0 if ball.bias is None else ball.bias)) / ball.gain
    return u.norm(dim=-1) / ball.radius


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", list(NORMS))
def test_outputs_lie_in_the_ball_and_reach_its_surface(model_type: str, dtype: torch.dtype) -> None:
    norm = single_model(model_type).get_submodule(NORMS[model_type]).to(dtype)
    ball = ball_of(norm, 32)
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 5, 500)[:, None]
    with torch.no_grad():
        y = copy.deepcopy(norm).float()(x)
    share = inside(ball, y)
    assert float(share.max()) <= 1 + 1e-6
    assert float(share[-100:].min()) >= 0.9999


@pytest.mark.parametrize("width", [31, 32])
def test_radius_and_gain_by_hand(width: int) -> None:
    norm = nn.RMSNorm(width, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 3, width))
    ball = ball_of(norm, width)
    assert far(ball.gain * ball.radius, norm.weight * width**0.5) <= 1e-5
    assert ball.largest() == pytest.approx(3 * width**0.5, rel=1e-5)
    assert ball.largest() >= 3 * width**0.5
    assert (ball.bias, ball.centered) == (None, False)
    layer = nn.LayerNorm(width)
    with torch.no_grad():
        layer.bias.normal_()
    ball = ball_of(layer, width)
    assert far(ball.gain * ball.radius, torch.full((width,), width**0.5)) <= 1e-5
    assert ball.centered
    assert ball.bias is not None
    assert far(ball.bias, layer.bias) <= 1e-6


class Largest(nn.Module):
    """Divides by the largest entry: ignores the scale, but gives no ball of one radius."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)


class Slack(nn.Module):
    """A norm that lets short tokens grow."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x / mean.sqrt().clamp_min(1e-12) * (1 + 0.5 * (mean < 0.5))


@pytest.mark.parametrize("module", [Largest(), Slack(), nn.Linear(16, 16), nn.Identity(), nn.Tanh()])
def test_what_is_no_norm_has_no_ball(module: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError):
        ball_of(module, 16)


def test_a_norm_of_another_width_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        ball_of(nn.LayerNorm(8), 16)

"""Norms are recognised by what they do, and become the affine map they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import far
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.norm_scale import ball_of
from duat_cli.models.block.norms import _mean_free, freeze, recognise, with_zeros

WIDTHS = [2, 3, 4, 5, 7, 8, 33, 64]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randomised(module: nn.Module, seed: int = 1) -> nn.Module:
    for k, p in enumerate(module.parameters()):
        p.copy_(normal(*p.shape, seed=seed + k))
    return module.double().eval()


class Plain(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


NORMS: dict[str, tuple[Callable[[int], nn.Module], bool]] = {  # name -> (made of a width, removes the mean)
    "LayerNorm": (nn.LayerNorm, True),
    "LayerNorm without bias": (lambda w: nn.LayerNorm(w, bias=False), True),
    "LayerNorm without gain": (lambda w: nn.LayerNorm(w, elementwise_affine=False), True),
    "LayerNorm with large eps": (lambda w: nn.LayerNorm(w, eps=1e-3), True),
    "LayerNorm with eps 0.1": (lambda w: nn.LayerNorm(w, eps=0.1), True),
    "LayerNorm with eps 100": (lambda w: nn.LayerNorm(w, eps=100.0), True),
    "RMSNorm with eps 0.1": (lambda w: nn.RMSNorm(w, eps=0.1), False),
    "RMSNorm with eps 1e5": (lambda w: nn.RMSNorm(w, eps=1e5), False),
    "RMSNorm": (lambda w: nn.RMSNorm(w, eps=1e-6), False),
    "RMSNorm by hand": (lambda w: Plain(lambda x: rms(x, 1e-6)), False),
    "L2": (lambda w: Plain(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)), False),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", list(NORMS))
def test_norms_are_recognised_at_every_width(name: str, width: int) -> None:
    make, centered = NORMS[name]
    module, x = randomised(make(width)), normal(1, 5, width)
    form = recognise(module, x, module(x))
    assert form is not None
    assert form.centered == centered or width == 2  # two mean-free values are one value and its negative
    y = module(x)
    assert far(freeze(form, x, y)(x), y) <= 1e-12


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm, CohereLayerNorm, T5LayerNorm])
@pytest.mark.parametrize("width", [6, 7])
def test_the_norms_of_transformers_are_recognised_in_float32(cls: type[nn.Module], width: int) -> None:
    module = randomised(cls(width)).float()
    x = normal(1, 5, width).float()
    y = module(x)
    form = recognise(module, x, y)
    assert form is not None
    assert form.centered == (cls is CohereLayerNorm)
    assert far(freeze(form, x, y)(x), y) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "scale"), [
    ("LayerNorm", 1e-5**-0.5), ("LayerNorm with large eps", 1e-3**-0.5), ("RMSNorm", 1e3), ("L2", 1e12),
])  # fmt: skip
def test_the_scale_of_the_zero_vector_is_that_of_what_is_close_to_it(
    name: str, scale: float, dtype: torch.dtype
) -> None:
    module, x = randomised(NORMS[name][0](6)).to(dtype), normal(1, 5, 6).to(dtype)
    form = recognise(module, x, module(x))
    assert form is not None
    x[:, 2] = 0.0
    frozen = freeze(form, x, module(x))
    found = with_zeros(frozen, x, module)
    factor = float((form.gain.flatten()[0] / getattr(module, "weight", torch.ones(6))[0]).abs())
    bar = 1e-6 if dtype is torch.float64 else 1e-4
    assert far(found.scale[0, 2] * factor, torch.tensor([scale], dtype=dtype)) <= bar
    others = [0, 1, 3, 4]
    assert torch.equal(found.scale[:, others], frozen.scale[:, others])


def test_gain_bias_and_scale_are_the_formula() -> None:
    """LayerNorm: y_j = (x_j - mean) / sqrt(var + eps) * g + β; gain and scale are known up to one factor."""
    module, x = randomised(nn.LayerNorm(8)), normal(1, 5, 8)
    form = recognise(module, x, module(x))
    assert form is not None
    frozen = freeze(form, x, module(x))
    assert far(form.bias.reshape(-1), module.bias) <= 1e-12
    scale = (centred(x).square().mean(-1, keepdim=True) + module.eps).rsqrt()
    assert far(frozen.scale * form.gain.reshape(1, 1, -1), scale * module.weight) <= 1e-12
    z = normal(1, 5, 8, seed=9)
    assert far(frozen(z), centred(z) * scale * module.weight + module.bias) <= 1e-12


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_channels_have_a_scale_each(groups: int) -> None:
    """As streams side by side do: y_c = x_c / rms(its group) * g_c."""
    gain, x = normal(8, seed=3), normal(1, 5, 8)
    module = Plain(lambda v: rms(v.unflatten(-1, (groups, -1)), 1e-6).flatten(-2) * gain)
    form = recognise(module, x, module(x))
    assert form is not None
    assert form.groups == groups
    frozen = freeze(form, x, module(x))
    assert frozen.scale.shape == (1, 5, groups)
    z, inverse = normal(1, 5, 8, seed=9), x.unflatten(-1, (groups, -1)).square().mean(-1, keepdim=True).rsqrt()
    assert far(frozen(z), (z.unflatten(-1, (groups, -1)) * inverse).flatten(-2) * gain) <= 1e-4  # eps
    with pytest.raises(UnsupportedModelError, match="is no norm whose output has a largest size"):
        ball_of(module, 8)


def test_gains_of_zero_and_below_are_kept() -> None:
    module, x = randomised(nn.RMSNorm(6, eps=1e-6)), normal(1, 5, 6)
    module.weight[0], module.weight[1] = 0.0, -2.0
    form = recognise(module, x, module(x))
    assert form is not None
    ratio = form.gain.reshape(-1) / module.weight
    assert float(form.gain.reshape(-1)[0]) == 0.0
    assert far(ratio[1:], ratio[1].expand(5)) <= 1e-6


def test_a_gain_that_differs_by_head_is_kept() -> None:
    """Query and key norms over (heads, width)."""
    gain = normal(3, 4, seed=3)
    module, x = Plain(lambda v: rms(v, 1e-6) * gain), normal(1, 5, 3, 4)
    form = recognise(module, x, module(x))
    assert form is not None
    assert form.gain.shape == (1, 1, 3, 4)
    assert far(freeze(form, x, module(x))(x), module(x)) <= 1e-12


def test_a_frozen_norm_is_affine_and_fits_another_token_count() -> None:
    module, x = randomised(nn.LayerNorm(7)), normal(1, 5, 7)
    form = recognise(module, x, module(x))
    assert form is not None
    assert form.gain.numel() == form.bias.numel() == 7
    longer = normal(1, 9, 7, seed=4)
    frozen = freeze(form, longer, module(longer))
    assert far(frozen(longer), module(longer)) <= 1e-12
    a, b = normal(1, 9, 7, seed=5), normal(1, 9, 7, seed=6)
    zero = torch.zeros_like(a)
    assert far(frozen(a + 2 * b), frozen(a) + 2 * frozen(b) - 2 * frozen(zero)) <= 1e-12
    assert far(module(a + 2 * b), module(a) + 2 * module(b) - 2 * module(zero)) > 0.1  # the norm itself is not


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Tanh": nn.Tanh,
    "Softsign": nn.Softsign,
    "Sigmoid": nn.Sigmoid,
    "erf": lambda: Plain(torch.erf),
    "arctan": lambda: Plain(torch.arctan),
    "Identity": nn.Identity,
    "Linear": lambda: nn.Linear(8, 8),
    "Linear without bias": lambda: nn.Linear(8, 8, bias=False),
    "a scale": lambda: Plain(lambda x: 0.3 * x),
    "zero": lambda: Plain(torch.zeros_like),
    "constant": lambda: Plain(torch.ones_like),
    "softmax": lambda: nn.Softmax(dim=-1),
    "softplus": nn.Softplus,
    "dropout in eval": lambda: nn.Dropout(0.1),
    "norm, then GELU": lambda: Plain(lambda x: nn.functional.gelu(rms(x, 1e-6))),
    "norm, then ReLU": lambda: Plain(lambda x: nn.functional.relu(rms(x, 1e-6))),
    "sign": lambda: Plain(torch.sign),
    "norm over the tokens": lambda: Plain(lambda x: x / x.norm(dim=1, keepdim=True)),
    "gated by itself": lambda: Plain(lambda x: rms(x * x.sigmoid(), 1e-6)),
    "scaled by the largest": lambda: Plain(lambda x: x.abs() / x.abs().amax(-1, keepdim=True)),
    "two inputs": lambda: nn.Bilinear(8, 8, 8),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_what_is_no_norm_is_refused(name: str) -> None:
    module, x = randomised(OTHERS[name]()), normal(1, 5, 8)
    y = normal(1, 5, 8, seed=2) if name == "two inputs" else module(x)
    assert recognise(module, x, y) is None


@pytest.mark.parametrize("name", ["Tanh", "Softsign", "Sigmoid", "erf", "arctan"])
def test_what_saturates_is_no_norm_where_it_is_all_but_linear(name: str) -> None:
    module, x = OTHERS[name](), 1e-4 * normal(1, 5, 8)
    assert recognise(module, x, module(x)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-6, 0.1, 100.0])
@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_is_frozen_as_it_is_however_large_its_eps(cls: Any, eps: float, dtype: torch.dtype) -> None:
    module, x = randomised(cls(8, eps=eps)).to(dtype), normal(1, 5, 8).to(dtype)
    form = recognise(module, x, module(x))
    assert form is not None
    assert form.centered == (cls is nn.LayerNorm)
    scale = (centred(x).double() if form.centered else x.double()).square().mean(-1, keepdim=True).add(eps).rsqrt()
    expected = scale * module.weight.double()
    got = freeze(form, x, module(x)).scale.double() * form.gain.double()
    assert far(got, expected) <= 10 * torch.finfo(dtype).eps


GATED = {"mamba2": lambda: MambaRMSNormGated(8, group_size=4), "qwen3_next": lambda: Qwen3NextRMSNormGated(8)}


@pytest.mark.parametrize("name", list(GATED))
def test_gated_norms_with_their_gate_are_refused(name: str) -> None:
    """Called with a gate, the output is no norm of the first input alone."""
    module = randomised(GATED[name]()).float()
    x, gate = normal(1, 5, 8).float(), normal(1, 5, 8, seed=3).float()
    assert recognise(module, x, module(x, gate)) is None


def test_another_output_than_the_modules_is_refused() -> None:
    """What runs must be what was recorded: an output off by 1 in 10,000 is not this norm's."""
    module, x = randomised(nn.LayerNorm(8)), normal(1, 5, 8)
    y = module(x)
    assert recognise(module, x, y) is not None
    assert recognise(module, x, y * (1 + 1e-4 * normal(1, 5, 8, seed=7))) is None


@pytest.mark.parametrize("shape", [(1, 5, 1), (1, 5)])
def test_outputs_of_another_shape_and_single_features_are_refused(shape: tuple[int, ...]) -> None:
    module = nn.LayerNorm(1, elementwise_affine=False).double()
    assert recognise(module, torch.zeros(1, 5, 1, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)) is None
    assert recognise(module, torch.zeros(1, 5, 4, dtype=torch.long), torch.zeros(1, 5, 4, dtype=torch.long)) is None


@pytest.mark.parametrize("width", range(2, 40))
def test_the_probe_has_no_mean_and_no_zero(width: int) -> None:
    u = _mean_free(torch.ones(2, width, dtype=torch.float64))[0]
    assert abs(float(u.sum())) <= 1e-12
    assert float(u.abs().min()) > 0


def test_a_norm_over_one_element_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="one element"):
        _mean_free(normal(1, 5, 1))

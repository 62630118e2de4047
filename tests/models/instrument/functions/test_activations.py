"""A slope computed once is the slope that autograd computes for every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from duat_cli.models.instrument.functions.activations import SlopesOnce

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "relu in place": lambda x: functional.relu(x * 1.0, inplace=True),
    "tanh": nn.Tanh(),
    "sigmoid": torch.sigmoid,
    "not in the list": functional.softplus,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_slope_computed_once_is_the_slope(name: str) -> None:
    """One by one and batched."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    probes = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with SlopesOnce():
        output = ACTIVATIONS[name](x)
    want = ACTIVATIONS[name](x)
    assert torch.equal(output, want)

    def pulled(of: Tensor, probe: Tensor) -> Tensor:
        return torch.autograd.grad(of, x, probe, retain_graph=True)[0]

    batched = torch.func.vmap(lambda probe: pulled(output, probe))(probes)
    for probe, gradient in zip(probes, batched, strict=True):
        assert torch.allclose(gradient, pulled(want, probe), atol=1e-12)
        assert torch.allclose(gradient, pulled(output, probe), atol=1e-12)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_the_slope_is_computed_in_the_forward_pass(name: str) -> None:
    x = torch.randn(5).requires_grad_()
    with SlopesOnce():
        output = ACTIVATIONS[name](x)
    assert "Sloped" in type(output.grad_fn).__name__

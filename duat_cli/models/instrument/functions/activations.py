"""Activations: held as multiples of their input, or with slopes that are computed once for all gradients.

Written as g(z) = (g(z) / z) z, with the ratio of one pass held, an activation is linear. For GELU and SiLU the ratio is
the gate that multiplies z; for ReLU it is 0 or 1. Every activation held in this way has g(0) = 0, so that nothing is
lost where z is zero. If a model writes its activation or a norm out as a formula, the gate or the length in it is held
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import only_tensor

_FUNCTIONS = {
    functional.gelu, functional.silu, functional.relu, functional.leaky_relu, functional.elu, functional.mish,
    functional.relu6, functional.hardswish, functional.tanh, torch.tanh, torch.relu, Tensor.tanh, Tensor.relu,
}  # fmt: skip
_GATES = {
    torch.erf, Tensor.erf, torch.sigmoid, Tensor.sigmoid, functional.sigmoid,
    torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt,  # the length of a token, where a norm is written out
}  # fmt: skip
_POWERS = {torch.pow, Tensor.pow, Tensor.__pow__}


@dataclass
class Ratios:
    """The ratios of one pass, in call order. Without `held` they are recorded, with it they are used."""

    found: list[Tensor] = field(default_factory=list)
    held: bool = False
    _calls: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    inside: bool = False  # whether an activation runs, whose own functions are not looked at

    def hold(self) -> None:
        """Holds every activation at its recorded ratio from now on; to be called before every replay."""
        self.held, self._calls = True, iter(self.found)

    def gate(self, function: Callable[[], Tensor]) -> Tensor:
        """The output of a gate, recorded; where held, the recorded one."""
        if self.held:
            return next(self._calls)
        self.found.append(function().detach())
        return self.found[-1]

    def of(self, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """g(z), with its ratio recorded; where held, z times the recorded ratio."""
        if self.held:
            return z * next(self._calls)
        with holding(self, inside=True):
            y = function(z)
        if y.shape != z.shape or bool(y[z == 0].any()):
            raise UnsupportedModelError("an activation between the last block and the output is not zero at zero")
        self.found.append(torch.where(z == 0, torch.zeros_like(y), y / z))
        return y

    def of_module(self, module: nn.Module, original: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Tensor:
        """`of` for an activation that is a module; to be given to `patched`."""
        return self.of(only_tensor(module, args, kwargs), original)


class RatioMode(TorchFunctionMode):
    """Passes the activations that are plain functions, and gates, through `Ratios`."""

    def __init__(self, ratios: Ratios) -> None:
        super().__init__()
        self._ratios = ratios

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        root = func in _POWERS and args[1:] in {(0.5,), (-0.5,)}
        if (func in _GATES or root) and not self._ratios.inside:
            return self._ratios.gate(lambda: func(*args, **kwargs))
        if func not in _FUNCTIONS or self._ratios.inside or not args or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return self._ratios.of(args[0], lambda z: func(z, *args[1:], **kwargs))


_ELEMENTWISE = {
    functional.gelu,
    functional.silu,
    functional.relu,
    functional.tanh,
    functional.sigmoid,
    torch.tanh,
    torch.sigmoid,
    torch.relu,
}


class SlopesOnce(TorchFunctionMode):
    """While active, the slope of an activation is computed in the forward pass: once, not once per probe."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTWISE and args and args[0].requires_grad and not kwargs.get("inplace"):
            return _Sloped.apply(args[0], lambda z: func(z, *args[1:], **kwargs))
        return func(*args, **kwargs)


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = z.detach().requires_grad_()
        with torch.enable_grad():
            y = function(leaf)
        ctx.save_for_backward(*torch.autograd.grad(y, leaf, torch.ones_like(y)))
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return gradients[0] * slope, None

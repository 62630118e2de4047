"""Slopes of activations, computed once for all the gradients that are carried back through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
    """While active, an activation's slope is computed in the forward pass: once, not once a probe."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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

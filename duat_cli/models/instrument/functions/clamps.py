"""Clamps inside attention as affine maps: which entries are cut off is decided once, by the input, and then held.

A model that clips queries, keys and values clips none of them on most inputs, but would clip some of the vectors that a
replay sends: held, the clamp is the identity where it was, and a constant where it cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from duat_cli.models.instrument.attention import Watch

_CLAMPS = {torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, Tensor.clamp_, Tensor.clip_}


@dataclass(frozen=True)
class HeldClamp:
    """One clamp of one pass."""

    kept: Tensor  # bool: where it left its input as it was
    value: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self.kept, x, self.value)


class ClampFreezer(TorchFunctionMode):
    """Watches the clamps of one attention module outside the attention function, those of floating-point numbers.

    Not held, every one is written down; held, they act as they did, in the same order.
    """

    def __init__(self, watch: Watch, clamps: list[HeldClamp], *, held: bool) -> None:
        super().__init__()
        self._watch, self._clamps, self._held, self._calls = watch, clamps, held, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CLAMPS or self._watch.inside_interface or not args[0].is_floating_point():
            return func(*args, **kwargs)
        x = args[0]
        if self._held:
            self._calls += 1
            y = self._clamps[self._calls - 1](x)
        else:
            before = x.clone()
            y = func(*args, **kwargs)
            self._clamps.append(HeldClamp(before == y, y.clone()))
        return x.copy_(y) if func in {Tensor.clamp_, Tensor.clip_} else y

"""The softmax of a model's own attention, seen or replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)


class Softmax(TorchFunctionMode):
    """Keeps what every softmax gives, or gives back what it is told."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self._given = None if given is None else iter(given)
        self.values: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SOFTMAX:
            return out
        self.values.append(out)
        return out if self._given is None else next(self._given)

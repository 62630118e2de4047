"""What torch functions give in a model's own pass, kept or replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)


class Kept(TorchFunctionMode):
    """Keeps what these functions give, in order; or gives back what was kept, and behind the last of it what they
    give."""

    def __init__(self, functions: Any, values: list[Tensor] | None = None) -> None:
        super().__init__()
        self._functions, self._given = functions, None if values is None else iter(values)
        self.values: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in self._functions:
            return out
        self.values.append(out)
        return out if self._given is None else next(self._given, out)

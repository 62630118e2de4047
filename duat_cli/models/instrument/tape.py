"""The tensors that a mixer's own code makes, numbered, so that one can be exchanged and others held.

The code of one module, called with arguments of the same shapes, makes the same tensors in the same order. How many a
kernel makes depends on the number of tokens, so tensors behind the kernel are counted from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from duat_cli.compat.torch import base_of
from duat_cli.models.block.mixer import Place
from duat_cli.models.instrument.interception import GATES

SQUASHING = GATES | {functional.gelu, functional.logsigmoid}
LAYERS = {functional.linear, torch.baddbmm}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm}
"""Products, which count as layers where one operand is a parameter or a part of one."""


def can_be_held(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operation is a squashing function or a layer, whose output can be held."""
    if function in PRODUCTS:
        return any(isinstance(one, Tensor) and isinstance(base_of(one), nn.Parameter) for one in args)
    return function in SQUASHING or function in LAYERS


class Reached(Exception):  # noqa: N818 - a signal, not an error
    """Ends a run at the tensor that was asked for. kept: the tensors that were asked for before it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.kept: dict[Place, Tensor] = {}


class Tape(TorchFunctionMode):
    """Counts operations that return tensors, from 0. One that writes to part of a tensor counts as returning it.

    seen(place, whether it can be held, tensor): called for every floating-point tensor that is made. exchanged: tensors
    that replace those made at these places. held: tensors that operations of these numbers return for any input.
    until: the place whose tensor is raised with Reached.
    """

    def __init__(
        self,
        seen: Callable[[Place, bool, Tensor], None] | None = None,
        *,
        exchanged: Mapping[Place, Tensor] | None = None,
        held: Mapping[int, Tensor] | None = None,
        until: Place | None = None,
    ) -> None:
        super().__init__()
        self.count = 0
        self._seen, self._exchanged, self._held, self._until = seen, exchanged or {}, held or {}, until

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number = self.count
        holdable = can_be_held(func, args)
        if number in self._held and holdable and Place(number, None) not in self._exchanged:
            self.count += 1
            return self._held[number]
        output = func(*args, **kwargs)
        if func is Tensor.__setitem__:
            output = args[0]
        many = isinstance(output, tuple | list) and not isinstance(output, torch.Size)
        tensors = list(output) if many else [output]
        if not any(isinstance(tensor, Tensor) for tensor in tensors):
            return output
        self.count += 1
        changed = False
        for element, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            place = Place(number, element if many else None)
            if place in self._exchanged:
                given = self._exchanged[place].to(tensor.dtype)
                tensors[element], changed = tensor.copy_(given) if func is Tensor.__setitem__ else given, True
            if self._until == place:
                raise Reached(tensors[element])
            if self._seen is not None:
                self._seen(place, holdable, tensors[element])
        if not changed:
            return output
        return type(output)(tensors) if many else tensors[0]  # also where its fields have names (`max`)

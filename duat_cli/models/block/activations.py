"""Activation functions that a block holds as plain functions, with modules in their place.

Units are modules, because only a module's call can be seen and its output held. `torch.nn.TransformerEncoderLayer` and
much research code keep `torch.nn.functional.gelu` as an attribute instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FUNCTIONS = frozenset(
    {
        functional.celu, functional.elu, functional.gelu, functional.hardsigmoid, functional.hardswish,
        functional.hardtanh, functional.leaky_relu, functional.logsigmoid, functional.mish, functional.relu,
        functional.relu6, functional.selu, functional.sigmoid, functional.silu, functional.softplus,
        functional.softsign, functional.tanh, torch.relu, torch.selu, torch.sigmoid, torch.tanh,
    }
)  # fmt: skip


class Activation(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def put_activations(blocks: Iterable[nn.Module]) -> None:
    """Puts a module in the place of each activation function of torch that a module of these blocks has as an
    attribute. A module without others inside is an activation itself, and stays as it is."""
    for module in [module for block in blocks for module in block.modules() if any(module.children())]:
        for name, held in [*vars(module).items()]:
            if _is_function(held):
                setattr(module, name, Activation(held))


@contextlib.contextmanager
def functions_again(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """While active, the functions stand where they stood: code that asks which one it has is answered as ever."""
    modules = dict.fromkeys(module for block in blocks for module in block.modules())
    put = [(owner, *child) for owner in modules for child in owner.named_children() if isinstance(child[1], Activation)]
    for owner, name, stand_in in put:
        delattr(owner, name)
        setattr(owner, name, stand_in.function)
    try:
        yield
    finally:
        for owner, name, stand_in in put:
            setattr(owner, name, stand_in)


def _is_function(held: Any) -> bool:
    function = held.func if isinstance(held, functools.partial) else held
    return isinstance(function, FunctionType | BuiltinFunctionType) and function in FUNCTIONS

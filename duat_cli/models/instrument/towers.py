"""Encoders of pictures and sound in front of the blocks: passes of one prompt give them the same input every time, and
they take most of a pass where the model behind them is small."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duat_cli.models.instrument.calls import mappings_in
from duat_cli.models.instrument.hooks import Forward, patched

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Known(NamedTuple):
    given: tuple[Any, Any]  # copies of args and kwargs
    output: Any


class Towers:
    """The encoders beside the blocks of a model: the outermost modules, outside the list of blocks, that hold a list of
    modules themselves."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._modules = list(_towers(model, set(blocks)))
        self._known: dict[int, _Known] = {}  # by the number of the call in a pass, so that those of one pass are kept

    @contextlib.contextmanager
    def active(self, numbers: Iterator[int]) -> Iterator[None]:
        """While active, a call of a tower with the input of the last pass returns a copy of the output that it had.

        numbers: counts the calls in this pass.
        """

        def instead(_module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
            number, given = next(numbers), (args, kwargs)
            known = self._known.get(number)
            if known is not None and _same(known.given, given):
                return copy.deepcopy(known.output)
            if mappings_in(args, kwargs) or not _plain(given):  # it may put something into a mapping
                return original(*args, **kwargs)
            given = copy.deepcopy(given)  # before the module could write to it
            output = original(*args, **kwargs)
            self._known.pop(number, None)
            if _plain(output):
                self._known[number] = _Known(given, copy.deepcopy(output))
            return output

        with contextlib.ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(patched(module, instead))
            yield


def _towers(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        inside = set(child.modules())
        if blocks.isdisjoint(inside):
            if any(isinstance(one, nn.ModuleList) for one in inside):
                yield child
        elif not isinstance(child, nn.ModuleList):
            yield from _towers(child, blocks)


def _plain(value: Any) -> bool:
    """Whether a value can be copied and compared: tensors that take part in no gradient, numbers and texts, and lists
    and mappings of them."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return all(map(_plain, value)) if isinstance(value, list | tuple) else isinstance(value, PLAIN)


def _same(first: Any, second: Any) -> bool:
    """Whether two plain values are equal to the bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        alike = (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
        return alike and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(itertools.starmap(_same, zip(first, second, strict=True)))
    return bool(first == second)

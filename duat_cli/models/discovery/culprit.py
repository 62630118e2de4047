"""Which module of a block that is not affine makes it so: the innermost that is, of what it is given, no affine map."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.tracing import Event


def not_affine_in(block: nn.Module, attending: tuple[nn.Module, ...], outputs: list[Callable[[], Any]]) -> str:
    """What is said of the module to blame; empty where none stands out.

    outputs: replays of the block on 0, x, r and x + r, with everything held that can be.
    """
    seen: list[list[Event]] = []
    for replay in outputs:
        events: list[Event] = []

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, events: list[Event] = events) -> None:
            events.append(Event(module, args, kwargs, output))

        with hooked(block.modules(), after=after), contextlib.suppress(Exception):
            replay()
        seen.append(events)
    names = {module: name for name, module in block.named_modules()}
    for calls in zip(*seen, strict=False):  # inner modules end before those around them
        module = calls[0].module
        results = [call.result for call in calls]
        if len({call.module for call in calls}) > 1 or any(result is None for result in results):
            continue
        given = [list(call.tensors) for call in calls]
        if all(map(_affine, zip(*given, strict=False))) and not _affine(tuple(results)):
            said = f"; it ceases to be so in {names[module] or 'the block'} ({type(module).__name__})"
            if module in attending:
                return (
                    f"{said}, whose output is more than held weights on values: a softmax that is not held, weights "
                    "that are used once more, or values that are no linear map"
                )
            if any(module.children()):
                return f"{said}, by what stands between its layers and is no module"
            return said
    return ""


def _affine(values: tuple[Tensor, ...]) -> bool:
    """Whether four values are as those of an affine map of 0, x, r and x + r."""
    at_0, at_x, at_r, at_sum = values
    if len({value.shape for value in values}) > 1:
        return False
    if all(torch.equal(value, at_0) for value in values):  # a mask, say, whose sums overflow
        return True
    return relative_error(at_x + at_r - at_0, at_sum) <= tolerance_for(at_0.dtype)

"""Finds what is to blame where the replay of a block is not affine, or does not give the block's own output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import random_like, relative_error, rounding, tolerance_for
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.interception import Choices
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Event
from duat_cli.text import listed

IN_UNITS = "in what its units give"
OUT_OF_RANGE = "numbers leave the range of"
AFFINE = "with its dynamic parameters frozen it is not affine"


def blamed(run: BlockRun, fault: str) -> str:
    """The text behind the fault of a block that no choice of units mends; empty where no cause stands out."""
    return _of_calls(run) or _choice(run) or _culprit(run, fault)


def _of_calls(run: BlockRun) -> str:
    """The text on a block that writes to its input, or gives another result each time; empty for any other."""
    given, again, own = run.input.clone(), run.input.clone(), [unit.output[None] for unit in run.units]
    first = run.replay(given, own).end.clone()
    if not torch.equal(given, run.input):
        return (
            "; it writes to its own input in place, so that what it was given is lost: let it add to a copy "
            "(x = x + y, not x += y)"
        )
    if relative_error(run.replay(again, own).end, first) > rounding(first.dtype):
        return "; called twice with one input it gives two results: it draws at random, or counts its calls"
    return ""


def _choice(run: BlockRun) -> str:
    """The text on a block that chooses, token by token, which of its modules run; empty for any other."""
    with Choices() as seen:
        run.replay(torch.zeros_like(run.input))
    return "; a router inside of it chooses, token by token, what it runs, and is not held" if seen.made else ""


def _culprit(run: BlockRun, fault: str) -> str:
    """The text on the module to blame where the block is not affine in its stream; empty for another fault."""
    if AFFINE not in fault:
        return ""
    x, r = run.input, random_like(run.input)
    items = (torch.zeros_like(x), x, r, x + r)
    found = not_affine_in(run.parts.module, run.parts.attending, [partial(run.replay, one) for one in items])
    if OUT_OF_RANGE in fault:
        return found
    if IN_UNITS in fault and not any(any(unit.children()) for unit in run.parts.units):
        names = listed(sorted({type(unit).__name__ for unit in run.parts.units}))
        return f"; its own forward joins what {names} gives with more of the stream: a gated FFN needs its own module"
    if found:
        return found
    return "; no module is to blame: its own forward may call a function (silu, rms_norm), which is not held"


def not_affine_in(block: nn.Module, attending: tuple[nn.Module, ...], outputs: list[Callable[[], Any]]) -> str:
    """The text on the module to blame: the innermost that is no affine map of its inputs. Empty where none stands out.

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
    """Whether four values could be those of an affine map at 0, x, r and x + r."""
    at_0, at_x, at_r, at_sum = values
    if len({value.shape for value in values}) > 1:
        return False
    if all(torch.equal(value, at_0) for value in values):  # a mask, say, whose sums overflow
        return True
    return relative_error(at_x + at_r - at_0, at_sum) <= tolerance_for(at_0.dtype)

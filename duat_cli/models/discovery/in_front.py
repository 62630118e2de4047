"""Attention of a block that also has a token mixer: whether it is one product H V of softmax rows and values that each
are made of one token, and whether it stands in front of the mixer.

The output of attention in front of a mixer reaches the block's output through the mixer alone. The shared transformers
of Zamba are of this kind: they read the stream and the embeddings, and their output is added to the mixer's input, not
to the stream.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import equal, random_like
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.parts import in_order, nonlinear_units, with_linears
from duat_cli.models.instrument.attention import AttentionCall, Watch, watched
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.interception import SoftmaxInterception
from duat_cli.models.instrument.tracing import Event, Trace


def attention_in_front(parts: BlockParts, mixer: nn.Module, event: Event, written: Trace) -> nn.Module | None:
    """The outermost module around the block's attention, if noise in place of its output does not change the block's
    output while the mixer's output is held; None otherwise.

    event: the call of the block.
    """
    around = [m for m in parts.module.modules() if m is not parts.module and set(parts.attention) <= set(m.modules())]
    outer = next((m for m in around if mixer not in set(m.modules()) and len(written.calls(m)) == 1), None)
    if outer is None or len(written.calls(mixer)) != 1:
        return None
    own, made = written.calls(mixer)[0].output, written.calls(outer)[0]
    if made.result is None or not made.tensors:
        return None
    noise = random_like(made.result)

    def exchanged(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if module is mixer:
            return own
        return noise if isinstance(output, Tensor) else (noise, *output[1:])

    with torch.no_grad(), hooked([outer, mixer], after=exchanged):
        output = event.again(event.tensors[0])
    return outer if torch.equal(output, event.result) else None  # type: ignore[arg-type]


def without_attention(parts: BlockParts, outer: nn.Module, written: Trace) -> BlockParts:
    """The block without the attention inside `outer`, which becomes one unit."""
    units = in_order([*nonlinear_units(parts.module, written, {outer, *parts.weighing}, parts.norms), outer], written)
    written.attention[:] = [call for call in written.attention if call.module not in parts.attention]
    without = replace(parts, attention=(), intercepted=frozenset(), value_projection=None, output_projection=None)
    return with_linears(replace(without, units=units), written)


def is_one_product(parts: BlockParts, written: Trace) -> bool:
    """Whether the attention that was seen is all of it: one product H V from every token of the module's input to every
    one of them, which the module returns as it is or through its own output layer."""
    calls = written.attention_of(parts.attention)
    ran = written.calls(parts.attention[0])
    taken = ran[0].tensors if ran else []
    tokens = taken[0].shape[-2] if taken else None
    if len(calls) != 1 or (calls[0].output.shape[1], calls[0].value.shape[2]) != (tokens, tokens):
        return False
    (call,), made = calls, written.calls(calls[0].module)
    if not made or made[0].result is None:
        return True
    if tokens is not None and parts.value_projection is None and _values_mix_tokens(made[0], tokens):
        return False
    projection = parts.output_projection
    inside = projection is not None and projection.linear in set(call.module.modules())
    return inside or call.path != "softmax interception" or equal(made[0].result, call.output.flatten(2))


def _values_mix_tokens(event: Event, tokens: int) -> bool:
    """Whether a change of the first token moves the values of the others."""
    if not event.tensors or event.tensors[0].ndim != 3 or event.tensors[0].shape[1] != tokens:
        return False
    x, seen = event.tensors[0], _Seen()
    changed = x.clone()
    changed[:, 0] = random_like(x)[:, 0]
    watch = Watch(seen)
    with torch.no_grad(), watched([event.module], watch), SoftmaxInterception(watch, lambda: event.module):
        for value in (x, changed):
            with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError):
                event.again(value)
    if len(seen.values) != 2 or seen.values[0].shape != seen.values[1].shape:
        return False
    return not torch.equal(seen.values[0][:, :, 1:], seen.values[1][:, :, 1:])


@dataclass
class _Seen:
    """A probe that records values."""

    values: list[Tensor] = field(default_factory=list)

    def captured(self, call: AttentionCall) -> None:
        self.values.append(call.value)

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        return None

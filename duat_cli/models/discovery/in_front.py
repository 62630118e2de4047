"""Attention in front of a token mixer: what it gives reaches the block's output through the mixer alone.

The shared transformers of Zamba are of this kind: they read the stream beside the embeddings, and what they give is
added to what the mixer reads, not to the stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import random_like
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.parts import in_order, nonlinear_units, with_linears
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.tracing import Event, Trace


def attention_in_front(parts: BlockParts, mixer: nn.Module, event: Event, written: Trace) -> nn.Module | None:
    """The outermost module around the block's attention, where noise in place of what it gives moves nothing in the
    block's output as long as the mixer gives what it gave; None where there is none.

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
    """The block without the attention inside of `outer`, which is a unit as a whole."""
    units = in_order([*nonlinear_units(parts.module, written, {outer}, parts.norms), outer], written)
    written.attention[:] = [call for call in written.attention if call.module not in parts.attention]
    without = replace(parts, attention=(), intercepted=frozenset(), value_projection=None, output_projection=None)
    return with_linears(replace(without, units=units), written)

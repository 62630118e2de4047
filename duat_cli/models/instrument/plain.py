"""The model as transformers runs it, untouched: what a pass under instruments is held against.

The DUAT sum is compared with the output of the instrumented model. If the instruments change the model (a mask is
lost, an argument dropped), the sum still fits. So the instrumented pass itself is compared with a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun, Rig


@dataclass(frozen=True)
class Outputs:
    """What one pass gave."""

    block: Any  # what the last block returned
    whole: Tensor  # the output of the stack, behind its final norm


def plain_outputs(last_block: nn.Module, forward: Callable[[], Any]) -> Outputs:
    """Run `forward` without instruments; a hook reads what the last block returns and changes nothing."""
    seen: list[Any] = []
    with torch.no_grad(), hooked([last_block], after=lambda module, args, kwargs, output: seen.append(output)):
        whole = _first_tensor(forward())
    return Outputs(seen[-1], whole)


def instrumented_outputs(rig: Rig, forward: Callable[[], Any], on_block: Callable[[BlockRun], None]) -> Outputs:
    """The same of a pass under an active rig."""
    last: list[Tensor] = []

    def listen(run: BlockRun) -> None:
        last[:] = [run.output]
        on_block(run)

    whole = _first_tensor(rig.run(forward, listen))
    return Outputs(last[0], whole)


def deviation(instrumented: Outputs, plain: Outputs) -> float:
    """The larger relative error of the two outputs. UnsupportedModelError where one is not finite."""
    block = hidden_of(plain.block, instrumented.block)
    if not bool(torch.isfinite(block).all() and torch.isfinite(plain.whole).all()):
        raise UnsupportedModelError("the model's own output, without duat's instruments, is not finite")
    error = max(relative_error(instrumented.block, block), relative_error(instrumented.whole, plain.whole))
    if not math.isfinite(error):
        raise UnsupportedModelError("under duat's instruments the model's output is not finite, though its own is")
    return error


def _first_tensor(output: Any) -> Tensor:
    """The output itself, or the first floating-point tensor of a tuple or a mapping."""
    values = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, Mapping) else output
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())

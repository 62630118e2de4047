"""The model as transformers runs it, untouched, to compare a pass under instruments with.

The DUAT sum is compared with the output of the instrumented model. If the instruments change the model (a mask is
lost, an argument dropped), the sum still fits. So the instrumented pass itself is compared with a plain one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import NotFiniteError, UnsupportedModelError
from duat_cli.models.arrays import relative_error
from duat_cli.models.block.activations import functions_again
from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.instrument.calls import tensors_in
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun, Rig


@dataclass(frozen=True)
class Outputs:
    """The outputs of one pass."""

    block: Any  # the output of the last block
    whole: Tensor  # the output of the stack, behind its final norm
    slot: HiddenSlot | None = None  # that of the last block, where `block` is its hidden states alone, (1, N, M)


class PlainPass:
    """A pass without instruments; the outputs of the blocks are read and not changed."""

    def __init__(self, blocks: Iterable[nn.Module], forward: Callable[[], Any]) -> None:
        self._blocks, self._forward = list(dict.fromkeys(blocks)), forward
        self._last: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), functions_again(self._blocks), hooked(self._blocks, after=self._see):
            yield

    def run(self) -> None:
        whole = _first_tensor(self._forward())
        self.outputs = Outputs(self._last, whole)

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._last = output


class InstrumentedPass:
    """A pass under a rig, whose outputs are read in the same way."""

    def __init__(self, rig: Rig, forward: Callable[[], Any], on_block: Callable[[BlockRun], None]) -> None:
        self._rig, self._forward, self._on_block = rig, forward, on_block
        self._last: Any = None
        self._slot: HiddenSlot | None = None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return self._rig.active()

    def run(self) -> None:
        self.returned = self._rig.run(self._forward, self._listen)  # the forward's own output, of any type
        self.outputs = Outputs(self._last, _first_tensor(self.returned), self._slot)

    def _listen(self, run: BlockRun) -> None:
        self._last, self._slot = run.output, run.parts.hidden
        self._on_block(run)


def deviation(instrumented: Outputs, plain: Outputs) -> float:
    """The larger relative error of the two outputs. Raises UnsupportedModelError where one is not finite."""
    slot = instrumented.slot
    own = _first_tensor(instrumented.block)
    block = _first_tensor(plain.block) if slot is None else slot.found(plain.block, own)
    if not bool(torch.isfinite(block).all() and torch.isfinite(plain.whole).all()):
        raise NotFiniteError("the model's own output, without duat's instruments, is not finite")
    error = max(relative_error(own, block), relative_error(instrumented.whole, plain.whole))
    if not math.isfinite(error):
        raise UnsupportedModelError("under duat's instruments the model's output is not finite, though its own is")
    return error


def _first_tensor(output: Any) -> Tensor:
    """The output itself, or the first floating-point tensor in nested tuples and mappings."""
    found = next((tensor for _, tensor in tensors_in(output)), None)
    if found is None:
        raise UnsupportedModelError(f"the model's output, {type(output).__name__}, holds no floating-point tensor")
    return found

"""The model's own forward with dynamic parameters held at given values; everything else, σ included, stays live."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import joined, parted
from duat_cli.models.holding import holding
from duat_cli.models.instrument.attention import RowSource, mixed_by
from duat_cli.models.instrument.calls import only_tensor
from duat_cli.models.instrument.hooks import Forward, Instead, patched
from duat_cli.models.instrument.mixer import with_rows
from duat_cli.models.instrument.rig import BlockRun, Rig
from duat_cli.models.instrument.routers import Routed, experts_modules, with_routing
from duat_cli.models.instrument.windows import WindowRows, Windows


def attending(run: BlockRun, rows: Sequence[RowSource]) -> contextlib.AbstractContextManager[None]:
    """While active, replays of the run mix values by these rows, one source per attention call."""
    own = run.recording.attention
    return holding(run.recording, attention=[replace(c, rows=given) for c, given in zip(own, rows, strict=True)])


def inner_norms(run: BlockRun, unit: nn.Module) -> list[nn.Module]:
    """The norms inside a nonlinear module of the block."""
    return [module for module in unit.modules() if module in run.parts.norms]


@contextlib.contextmanager
def holding_norms(run: BlockRun, unit: nn.Module, call: int) -> Iterator[None]:
    """While active, the norms inside a unit that runs outside a replay have the scale that they had in its call number
    `call`, counted from 0."""
    calls = sum(one.module is unit for one in run.units)
    with contextlib.ExitStack() as stack:
        for norm in inner_norms(run, unit):
            recorded, rests = run.recording.norms[norm], run.recording.norm_rests[norm]
            each = len(recorded) // calls
            kept = iter([*zip(recorded, rests, strict=True)][call * each : (call + 1) * each])

            def held(module: nn.Module, _: Forward, args: Any, kwargs: Any, kept: Any = kept) -> Any:
                frozen, rest = next(kept)
                return joined(frozen(only_tensor(module, args, kwargs)), rest)

            stack.enter_context(patched(norm, held))
        yield


@dataclass(frozen=True)
class Held:
    """The dynamic parameters that one block call is given in place of its own."""

    attention: Sequence[RowSource] | None = None  # H of each of its attention calls; None: live
    norms: dict[nn.Module, list[FrozenNorm]] = field(default_factory=dict)  # in call order; a norm left out stays live
    routers: dict[nn.Module, Routed] = field(default_factory=dict)  # by experts module; one left out stays live
    units: dict[nn.Module, list[Tensor]] = field(default_factory=dict)  # outputs in call order; one left out stays live
    cross: dict[nn.Module, list[Tensor]] = field(default_factory=dict)  # the same of cross-attention


class HeldRig(Rig):
    """Instruments under which block call k runs with the parameters of `held(k)`, or live where that is None. Not for
    capture."""

    def __init__(
        self, model: Any, blocks: Sequence[Any], *, interface: bool, held: Callable[[int], Held | None]
    ) -> None:
        super().__init__(model, blocks, interface=interface)
        self._held, self._number = held, 0
        self._here: Held | None = None
        self._used = defaultdict[object, Iterator[int]](itertools.count)  # numbers of the next calls in a block call

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        """H V with the held H, (batch, N, heads, d); None where H is live."""
        own = self.under_way is None or not self.under_way.in_cross(module)
        rows = self._next_rows() if own else None
        if rows is None:
            return None
        windows = Windows(len(value)) if len(value) > 1 else None
        if rows.tokens != value.shape[2] and (windows is not None or isinstance(rows, WindowRows)):
            name = type(module).__name__
            raise UnsupportedModelError(f"{name} attends within windows, where no other weights can be held")
        mixed = mixed_by(rows, value, windows)
        return mixed if windows is None else windows.outward(mixed)

    def _mixer_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        form, rows = self.mixer_of(module), self._next_rows()
        if rows is None or form is None:
            return original(*args, **kwargs)
        with holding(self, _here=None):  # its code runs several times
            return with_rows(form, original, args, kwargs, rows)

    def _unit_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        output = super()._unit_forward(module, original, args, kwargs)
        here = self._here
        given = None if here is None else here.units.get(module) or here.cross.get(module)
        if given is None:
            return output
        return joined(given[next(self._used[module])].clone(), parted(output)[1])  # blocks may write to it

    def _next_rows(self) -> RowSource | None:
        """H of the next attention call, if it is held."""
        if self._here is None or self._here.attention is None:
            return None
        return self._here.attention[next(self._used["attention"])]

    def _patches(self, parts: BlockParts) -> Iterator[tuple[nn.Module, Instead]]:
        yield from super()._patches(parts)
        yield from ((module, self._experts_forward) for module in experts_modules(parts.module))

    def _experts_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        routed = None if self._here is None else self._here.routers.get(module)
        if routed is not None:
            args, kwargs = with_routing(args, kwargs, routed)
        return original(*args, **kwargs)

    def _block_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        self._here, self._number = self._held(self._number), self._number + 1
        self._used.clear()
        try:
            return original(*args, **kwargs)
        finally:
            self._here = None

    def _norm_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        frozen = None if self._here is None else self._here.norms.get(module)
        if frozen is None:
            return original(*args, **kwargs)
        return frozen[next(self._used[module])](only_tensor(module, args, kwargs))

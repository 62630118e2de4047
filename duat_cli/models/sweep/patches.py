"""Activation patching: a pass of one prompt in which some dynamic parameters or hidden states are those of another
prompt. Everything that follows is computed by the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import hand_on
from duat_cli.models.instrument.held import Held, HeldRig
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.sweep.passes import BlockCall, BlockPass, Forward, Original


@dataclass(frozen=True)
class Patch:
    """The parameters and hidden states that some block calls are given from another prompt."""

    held: Mapping[int, Callable[[], Held]] = field(default_factory=dict)
    """Parameters by block call; called when it begins, since H of many patches would not fit at once."""
    stream: Mapping[int, tuple[slice, Tensor]] = field(default_factory=dict)
    """By block call: the tokens, and the hidden states, (1, N, M), from which those of these tokens are taken."""

    @property
    def start(self) -> int:
        """The first block call that the patch changes."""
        return min([*self.held, *self.stream])


class PatchedPass(BlockPass):
    """A pass with a patch that runs from the first patched block call on; blocks in front of it are not run again."""

    def __init__(
        self,
        structure: ModelStructure,
        forward: Forward,
        calls: Sequence[BlockCall],
        patch: Patch,
        weights: Weights | None = None,
    ) -> None:
        """calls: those of the pass of the prompt without a patch. weights: as in `BlockPass`."""
        super().__init__(structure, forward, self._call, weights=weights, start=patch.start)
        self.start, self._calls, self._patch = patch.start, calls, patch
        self._held: Held | None = None  # parameters for the block call under way
        blocks = [block.parts for block in structure.blocks]
        self._rig = HeldRig(structure.part, blocks, interface=structure.interface, held=lambda _number: self._held)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self._rig.active(), super().active():
            yield

    def _call(self, number: int, parts: BlockParts, original: Original, args: Any, kwargs: Any) -> Any:
        start, recorded = self._patch.start, self._calls[number]
        if number < start:
            return parts.hidden.exchanged(recorded.output, recorded.before, recorded.after.clone())
        if number == start:
            hand_on(args, kwargs, (recorded.args, recorded.kwargs))
        if number in self._patch.stream:
            tokens, other = self._patch.stream[number]
            hidden = parts.hidden.get(args, kwargs).clone()
            hidden[:, tokens] = other[:, tokens]
            args, kwargs = parts.hidden.put(args, kwargs, hidden)
        given = self._patch.held.get(number)
        self._held = None if given is None else given()
        try:
            return original(*args, **kwargs)
        finally:
            self._held = None

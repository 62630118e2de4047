"""What goes through a model beside its discovery, where its weights are read block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.sweep.lockstep import Pass


class Guest(Protocol):
    """Anew for every attempt at the discovery."""

    def proved(self, parts: BlockParts, written: Trace) -> None:
        """Called behind the proof of every block, under the proof's instruments, with the block's weights in memory.

        written: what discovery saw in the block.
        """
        ...

    def probe(self, run: BlockRun, /) -> None:
        """Called behind every block of the probe prompt."""
        ...

    def passes(self) -> Sequence[Pass]:
        """To go through every block once it is proved."""
        ...


class Riders:
    """Passes that go along, and ask nothing of discovery."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes

    def proved(self, parts: BlockParts, written: Trace) -> None:
        """Nothing is asked of a block."""

    def probe(self, run: BlockRun, /) -> None:
        """Nothing is asked of the probe prompt."""

    def passes(self) -> Sequence[Pass]:
        return self._passes

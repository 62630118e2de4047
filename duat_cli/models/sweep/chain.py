"""Test of whether blocks are connected only by their hidden states and by what they hand on in mappings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import taken
from duat_cli.models.discovery.structure import Discovered
from duat_cli.models.instrument.calls import Path, beside_handed, handed
from duat_cli.models.sweep.passes import BlockPass, Forward, Handler, Original


class Chain:
    """Two passes that show whether a block reads more of the blocks in front of it than their hidden states and the
    tensors in a mapping that goes from each block to the next.

    Keys of another layer that the model itself gives to a block are an example: a gradient carried back block by block
    would miss this path.
    """

    def __init__(self, blocks: Discovered, forward: Forward) -> None:
        self._blocks, self._called = blocks, list[nn.Module]()
        self._seen: tuple[list[list[Tensor]], list[list[Tensor]]] = [], []
        self.passes = [
            BlockPass(blocks, forward, self._handler(seen, shift))
            for seen, shift in zip(self._seen, (0.0, 0.1), strict=True)
        ]

    def _handler(self, seen: list[list[Tensor]], shift: float) -> Handler:
        left = dict[Path, Tensor]()

        def handle(number: int, parts: BlockParts, original: Original, args: Any, kwargs: Any) -> Any:
            hidden = taken(args, kwargs, parts.hidden.key)
            self._called[number:] = [parts.module]
            others = [t for path, t in handed(args, kwargs).items() if t is not left.get(path)]
            others += [t for t in beside_handed(args, kwargs) if t is not hidden]
            seen.append([t.clone() for t in others])
            before = parts.hidden.get(args, kwargs).clone()
            output = original(*args, **kwargs)
            left.clear()
            left.update(handed(args, kwargs))
            after = parts.hidden.found(output, before)
            moved = after + shift * after.std() * torch.ones_like(after).cumsum(-1).sin()
            return parts.hidden.exchanged(output, before, moved)

        return handle

    def broken(self) -> str | None:
        """The name of the first block that reads more, or None, once both passes have run."""
        for module, before, after in zip(self._called, *self._seen, strict=True):
            if len(before) != len(after) or not all(map(torch.equal, before, after)):
                return self._blocks.parts_of(module).name
        return None

    def require(self) -> None:
        """Raises UnsupportedModelError where a block reads more, once both passes have run."""
        name = self.broken()
        if name is not None:
            raise UnsupportedModelError(
                f"{name} reads more of the blocks in front of it than their hidden states (shared keys, perhaps), "
                "so what a removal does to it cannot be followed"
            )

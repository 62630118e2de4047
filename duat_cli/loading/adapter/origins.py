"""Which block of the base a block of a tuned checkpoint was, where the two have another number of blocks.

Removing blocks renumbers those behind them, and repeating blocks does too, so that names say nothing. Weights do: those
of a block that was kept, and tuned since, still point where the base's do, and those of two blocks of one model are at
right angles to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duat_cli.grouping import by_key
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.checkpoint.parts import Part, parts_of

SAMPLE = 1 << 14  # elements of a matrix that are compared, in whole rows
ALIKE = 0.5  # cosine from which on a block is said to be one of the base's

Samples = Mapping[str, Tensor]
"""By the name within the block: the first rows of a matrix, as a unit vector."""


@dataclass(frozen=True)
class Origin:
    """Of one block of the tuned checkpoint."""

    block: Part
    base: Part | None
    """The base's block that it was; None: it is like none of them."""
    cosine: float
    """To the base's block that it is most like, mean over their matrices."""


@dataclass(frozen=True)
class Renumbered:
    """A stack of which the tuned checkpoint has another number of blocks."""

    stack: str
    """Its name in the tuned checkpoint: model.layers."""
    base: Sequence[Part]
    """The base's blocks."""
    blocks: Sequence[Origin]

    @property
    def gone(self) -> list[Part]:
        """The base's blocks that none of the tuned checkpoint was."""
        kept = {one.base.name for one in self.blocks if one.base is not None}
        return [block for block in self.base if block.name not in kept]


def renumbered_stacks(base: BaseWeights, tuned: BaseWeights) -> list[Renumbered]:
    """Both to be open."""
    before, after = _stacks(base), _stacks(tuned)
    found = []
    for stack, blocks in after.items():
        same = next((name for name in before if stack in (name, _headless(name)) or _headless(stack) == name), None)
        if same is not None and len(before[same]) != len(blocks):
            found.append(Renumbered(stack, before[same], _origins(base, before[same], tuned, blocks)))
    return found


def _stacks(weights: BaseWeights) -> dict[str, list[Part]]:
    """'model.layers' -> its blocks, in the order of their numbers."""
    blocks = sorted(parts_of(weights.files, 1).blocks, key=lambda block: int(block.name.rpartition(".")[2]))
    return by_key((block.name.rpartition(".")[0], block) for block in blocks)


def _headless(stack: str) -> str:
    """The name without the prefix that it has in a model with a head; empty where it has none."""
    return stack.partition(".")[2]


def _origins(base: BaseWeights, before: Sequence[Part], tuned: BaseWeights, after: Sequence[Part]) -> list[Origin]:
    old, last, found = [_samples(base, block) for block in before], -1, []
    for block in after:
        own = _samples(tuned, block)
        cosines = torch.tensor([_cosine(own, other) for other in old])
        most = float(cosines.max())
        alike = (cosines >= most - 1e-6).nonzero()[:, 0].tolist()
        place = next((k for k in alike if k > last), alike[0])  # of the base's blocks that repeat each other, the next
        if most >= ALIKE:
            last = place
        found.append(Origin(block, before[place] if most >= ALIKE else None, most))
    return found


def _samples(weights: BaseWeights, block: Part) -> Samples:
    found = {}
    for name, entry in block.tensors.items():
        if len(entry.shape) == 2 and entry.elements:
            rows = weights.rows(name, -(-SAMPLE // entry.shape[1]))
            found[name.removeprefix(block.name)] = normalize(rows.reshape(-1).float().nan_to_num(), dim=0)
    return found


def _cosine(a: Samples, b: Samples) -> float:
    both = [float(a[name] @ b[name]) for name in a if name in b and a[name].shape == b[name].shape]
    return sum(both) / len(both) if both else 0.0

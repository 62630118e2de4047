"""The block of the base that each block of a tuned checkpoint was, where the two have different numbers of blocks.

Removing or repeating blocks renumbers those behind them, so names do not show it. Weights do: those of a block that was
kept, and tuned since, still point in the base's direction, and those of two different blocks of one model are nearly
orthogonal.
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
ALIKE = 0.5  # cosine from which on a block counts as one of the base's

Samples = Mapping[str, Tensor]
"""Name within the block -> the first rows of a matrix, as a unit vector."""


@dataclass(frozen=True)
class Origin:
    """The origin of one block of the tuned checkpoint."""

    block: Part
    base: Part | None
    """The base's block that it was; None if it is like none of them."""
    cosine: float
    """Cosine to the most similar block of the base, mean over their matrices."""


@dataclass(frozen=True)
class Renumbered:
    """A stack of blocks whose number in the tuned checkpoint differs from the base's."""

    stack: str
    """Its name in the tuned checkpoint: model.layers."""
    base: Sequence[Part]
    """The base's blocks."""
    blocks: Sequence[Origin]

    @property
    def gone(self) -> list[Part]:
        """The base's blocks that are the origin of no tuned block."""
        kept = {one.base.name for one in self.blocks if one.base is not None}
        return [block for block in self.base if block.name not in kept]


def renumbered_stacks(base: BaseWeights, tuned: BaseWeights) -> list[Renumbered]:
    """The stacks whose number of blocks differs, with the origins of their blocks. Both `base` and `tuned` must be
    open."""
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
    """The stack's name without the prefix that a model with a head adds; empty where it has none."""
    return stack.partition(".")[2]


def _origins(base: BaseWeights, before: Sequence[Part], tuned: BaseWeights, after: Sequence[Part]) -> list[Origin]:
    old, last, found = [_samples(base, block) for block in before], -1, []
    for block in after:
        own = _samples(tuned, block)
        cosines = torch.tensor([_cosine(own, other) for other in old])
        most = float(cosines.max())
        alike = (cosines >= most - 1e-6).nonzero()[:, 0].tolist()
        place = next((k for k in alike if k > last), alike[0])  # if blocks of the base are equal, the next
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

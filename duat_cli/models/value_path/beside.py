"""What runs beside a block's own attention and has an operator W'_c: cross-attention, or a mixer without softmax.

It is one of the block's units, so that a replay takes what it gives. Where that meets the stream, its scale t and the
proof of W'_c come of outputs that are put in its place, the block's own attention and its other units silent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import fit, gaussian, random_like, relative_error, wide
from duat_cli.models.instrument.records import Replay, silent_attention
from duat_cli.models.instrument.rig import BlockRun, zero_given
from duat_cli.models.value_path.factors import BlockFactors, Tap, meeting
from duat_cli.models.value_path.probed import SEED


@dataclass(frozen=True)
class Beside:
    """It in one block under one input."""

    run: BlockRun
    place: int
    """Of its unit call."""

    @property
    def output(self) -> Tensor:
        """What it gave."""
        return self.run.units[self.place].output

    def tap(self, what: str) -> Tap:
        """Where it meets the stream. what: it adds, for UnsupportedModelError where it does not."""
        zero, silent = torch.zeros_like(self.run.input), torch.zeros_like(self.output)
        stream = gaussian(tuple(zero.shape), zero, SEED + 1)
        replay = self._replay(torch.cat([zero, stream, zero]), [silent, silent, random_like(silent)])
        found = meeting(self.run, replay, stream)
        if found is None:
            raise UnsupportedModelError(f"{what} reaches the stream only through a nonlinear unit")
        return found

    def moved(self, tap: Tap, output: Tensor, nothing: Tensor) -> tuple[Tensor, float]:
        """What an output of it moves at the tap, (N, M), over one that holds the constants alone; and what of that may
        be rounding."""
        zero = torch.zeros_like(self.run.input)
        seen = tap.read(self._replay(torch.cat([zero, zero]), [output, nothing]))
        size = max(float(wide(each).norm()) for each in seen)
        return wide(seen[0]) - wide(seen[1]), 4 * torch.finfo(self.run.input.dtype).eps * size

    def _replay(self, items: Tensor, outputs: list[Tensor]) -> Replay:
        given = zero_given(self.run, len(items))
        given[self.place] = torch.stack([one.reshape(self.output.shape) for one in outputs])
        return self.run.replay(items, given, attention=silent_attention(self.run, len(items)))


def reached(known: BlockFactors, mixed: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """t, (N,), and the relative error that it leaves. mixed: known vectors in place of H V, (N, heads, d); target: what
    they move at the tap."""
    direction = torch.einsum("nhd,hdm->nm", mixed, known.heads.output)
    scale = fit(direction, target)
    return scale[:, 0], relative_error(scale * direction, target)

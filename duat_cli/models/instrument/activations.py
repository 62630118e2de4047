"""The size of a block's activations, to compare with the range of a narrow dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from duat_cli.models.instrument.rig import BlockRun

Place = Literal["norm", "attention", "ffn", "block"]


@dataclass
class Extremes:
    """Least and largest entry of outputs, kept on their device until they are asked for."""

    prompts: int = 1  # each prompt has its own extremes
    found: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)  # (prompts,) each

    def see(self, place: Place, output: Any) -> None:
        """Adds the extremes of a module's output. output: a tensor, or the first of a tuple, nested or not."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.numel():  # an expert without tokens puts out nothing
            self.found.append((place, *bounds_of(output, self.prompts)))

    def largest(self) -> list[tuple[float, Place]]:
        """Largest absolute value of each prompt and the place of that output; infinite where an entry is not finite."""
        places, low, high = zip(*self.found, strict=True)
        sizes = torch.maximum(-torch.stack(low), torch.stack(high)).tolist()
        return [
            max((size if math.isfinite(size) else math.inf, place) for size, place in zip(own, places, strict=True))
            for own in zip(*sizes, strict=True)
        ]


def bounds_of(output: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """Least and largest entry of each prompt's part, (prompts,) each; NaN where an entry is NaN."""
    if prompts == 1:
        low, high = torch.aminmax(output)
        return low[None], high[None]
    low, high = torch.aminmax(output.reshape(prompts, -1), dim=1)
    return low, high


def largest_activations(run: BlockRun) -> list[tuple[float, Place]]:
    """Largest absolute value of each prompt at the output of a norm, attention, an FFN unit or the block, with its
    place."""
    found = Extremes(run.prompts, [*run.recording.extremes.found])
    for unit in run.units:
        found.see("ffn", unit.output)
    found.found.append(("block", *run.bounds))
    return found.largest()

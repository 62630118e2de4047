"""How large the activations of a block become, against what a narrow dtype could hold."""

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
    """Least and largest entry of outputs; they stay where they were computed until they are asked for."""

    prompts: int = 1  # of which each has its own
    found: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)  # (prompts,) each

    def see(self, place: Place, output: Any) -> None:
        """output: what the module returned; of a tuple, nested or not, the first."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.numel():  # an expert without tokens puts out nothing
            self.found.append((place, *bounds_of(output, self.prompts)))

    def largest(self) -> list[tuple[float, Place]]:
        """Of each prompt (largest absolute value, whose output); infinite where an entry is not finite."""
        places, low, high = zip(*self.found, strict=True)
        sizes = torch.maximum(-torch.stack(low), torch.stack(high)).tolist()
        return [
            max((size if math.isfinite(size) else math.inf, place) for size, place in zip(own, places, strict=True))
            for own in zip(*sizes, strict=True)
        ]


def bounds_of(output: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """Least and largest entry of each prompt's part, (prompts,) each; NaN where an entry is."""
    if prompts == 1:
        low, high = torch.aminmax(output)
        return low[None], high[None]
    low, high = torch.aminmax(output.reshape(prompts, -1), dim=1)
    return low, high


def largest_activations(run: BlockRun) -> list[tuple[float, Place]]:
    """Of each prompt the largest absolute value at the output of a norm, attention, an FFN unit or the block."""
    found = Extremes(run.prompts, [*run.recording.extremes.found])
    for unit in run.units:
        found.see("ffn", unit.output)
    found.found.append(("block", *run.bounds))
    return found.largest()

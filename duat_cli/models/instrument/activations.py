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

    found: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)

    def see(self, place: Place, output: Any) -> None:
        """output: what the module returned; of a tuple, nested or not, the first."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.numel():  # an expert without tokens puts out nothing
            self.found.append((place, *torch.aminmax(output)))

    def largest(self) -> tuple[float, Place]:
        """(largest absolute value, whose output); infinite where an entry is not finite."""
        sizes = [(max(-float(low), float(high)), place) for place, low, high in self.found]
        return max((size if math.isfinite(size) else math.inf, place) for size, place in sizes)


def largest_activation(run: BlockRun) -> tuple[float, Place]:
    """The largest absolute value at the output of a norm, of attention, of an FFN unit or of the block."""
    found = Extremes([*run.recording.extremes.found])
    for unit in run.units:
        found.see("ffn", unit.output)
    found.found.append(("block", *run.bounds))
    return found.largest()

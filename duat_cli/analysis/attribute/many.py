"""Means over predictions, and the heads and neurons whose parts are large in the mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duat_cli.analysis.attribute.parts import BlockParts
from duat_cli.results.attribute import Attribution, Spread, Summary

Place = tuple[int, int | None]  # block, unit (None: the block's heads)


@dataclass
class _Sums:
    count: int = 0
    sum: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    absolute: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    square: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        """values: (predictions, parts) float64."""
        self.count += len(values)
        values = values.cpu()
        self.sum = self.sum + values.sum(dim=0)
        self.absolute = self.absolute + values.abs().sum(dim=0)
        self.square = self.square + values.square().sum(dim=0)


class Many:
    """Sums over the parts of all predictions."""

    def __init__(self) -> None:
        self._sums: defaultdict[Place, _Sums] = defaultdict(_Sums)

    def add(self, parts: BlockParts) -> None:
        """One block of some predictions."""
        if parts.heads.shape[1]:
            self._sums[parts.number, None].add(parts.heads)
        for k, unit in enumerate(parts.units):
            if unit.neurons is not None:
                self._sums[parts.number, k].add(unit.neurons)

    def summary(self, found: Sequence[Attribution], top: int) -> Summary | None:
        """None of a single prediction."""
        count = len(found)
        if count < 2:
            return None
        blocks = len(found[0].parts.static.blocks)
        units = [0.0] * blocks
        for one in found:
            for unit in one.parts.units:
                units[unit.block] += unit.value / count
        return Summary(
            predictions=count,
            logit=sum(one.logit for one in found) / count,
            tokens=sum(token.value for one in found for token in one.parts.tokens) / count,
            static=sum(one.parts.static.value for one in found) / count,
            units=units,
            head_bias=sum(one.parts.head_bias for one in found) / count,
            heads=self._leading(top, heads=True),
            neurons=self._leading(top, heads=False),
        )

    def _leading(self, top: int, *, heads: bool) -> list[Spread]:
        found: list[Spread] = []
        for (block, unit), sums in self._sums.items():
            if (unit is None) is not heads:
                continue
            mean, square = sums.sum / sums.count, sums.square / sums.count
            deviation = (square - mean.square()).clamp_min(0).sqrt()
            absolute = sums.absolute / sums.count
            for place in absolute.topk(min(top, len(absolute))).indices.tolist():
                found.append(
                    Spread(
                        block=block,
                        unit=unit,
                        index=place,
                        mean=float(mean[place]),
                        mean_absolute=float(absolute[place]),
                        deviation=float(deviation[place]),
                    )
                )
        return sorted(found, key=lambda one: -one.mean_absolute)[:top]

"""Adds up the prompts of `duat attribute` one by one into the report: means over predictions, and the heads and neurons
whose parts are large in the mean.

Each prompt is added as files hold it, in the dtype of the model or float32 if that is wider. So the means are the same
to the last bit, whichever process computed which prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.attribute.parts import BlockParts
from duat_cli.models.arrays import wide
from duat_cli.results.attribute import (
    AttributeReport,
    Attribution,
    AttributionCertificate,
    Continuation,
    Spread,
    Summary,
)
from duat_cli.results.base import Environment, ModelFacts, PromptFacts, Result, Run, Skipped
from duat_cli.statistics.ranking import largest

Place = tuple[int, int | None]  # block, unit (None: the block's heads)


@dataclass(frozen=True)
class Moments:
    """Sums of the parts at one place over the predictions of one prompt."""

    count: int
    sums: tuple[Tensor, ...]  # (parts,) each: Σ parts; with several predictions also Σ |parts| and Σ parts²
    in_expert: int | None  # neurons per expert, if the parts are neurons of all experts in turn

    def three(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of parts, of absolute parts and of squared parts, float64."""
        first, *rest = (one.double() for one in self.sums)
        return (first, first.abs(), first.square()) if not rest else (first, rest[0], rest[1])

    def plus(self, other: Moments) -> Moments:
        """The sums over the predictions of both, float64."""
        sums = tuple(a + b for a, b in zip(self.three(), other.three(), strict=True))
        return replace(self, count=self.count + other.count, sums=sums)


@dataclass
class PromptSums:
    """Sums over the predictions of one prompt."""

    dtype: torch.dtype  # of the model
    places: dict[Place, Moments] = field(default_factory=dict)

    def add(self, parts: BlockParts) -> None:
        """Adds one block of some of the predictions; each prediction comes once."""
        if parts.heads.shape[1]:
            self._add((parts.number, None), parts.heads, None)
        for k, unit in enumerate(parts.units):
            if unit.neurons is not None:
                self._add((parts.number, k), unit.neurons.total, unit.in_expert)

    def _add(self, place: Place, values: Tensor, in_expert: int | None) -> None:
        """values: (predictions, parts) float64."""
        values = values.cpu()
        sums: tuple[Tensor, ...] = (values[0],)
        if len(values) > 1:
            sums = (values.sum(dim=0), values.abs().sum(dim=0), values.square().sum(dim=0))
        found, known = Moments(len(values), sums, in_expert), self.places.get(place)
        found = found if known is None else known.plus(found)
        kept = wide(torch.empty(0, dtype=self.dtype)).dtype
        self.places[place] = replace(found, sums=tuple(one.to(kept) for one in found.sums))


@dataclass(frozen=True)
class Attributed:
    """Results of one prompt."""

    attribution: list[Attribution]
    continuation: Continuation | None
    sums: PromptSums


class AttributeHead(Result):
    """The part of a report that no prompt changes."""

    environment: Environment
    model: ModelFacts
    held: list[str]
    tolerance: float
    skipped: list[Skipped]
    warnings: list[str]


class AttributeTotal:
    """The prompts so far."""

    def __init__(self, top: int) -> None:
        """top: how many heads and neurons with large means are listed."""
        self._top = top
        self._prompts: list[PromptFacts] = []
        self._attribution: list[Attribution] = []
        self._continuations: list[Continuation] = []
        self._sums: dict[Place, Moments] = {}  # over the parts of all predictions

    def add(self, facts: PromptFacts, found: Attributed) -> None:
        """Adds the next prompt of the report."""
        self._prompts.append(facts)
        self._attribution += found.attribution
        if found.continuation is not None:
            self._continuations.append(found.continuation)
        for place, moments in found.sums.places.items():
            known = self._sums.get(place)
            self._sums[place] = moments if known is None else known.plus(moments)

    def report(self, head: AttributeHead, run: Run) -> AttributeReport:
        """The report; at least one prediction has to be added."""
        residual = max(max(one.residual, one.direct.residual) for one in self._attribution)
        return AttributeReport.explained(
            "there is one prediction",
            duat_version=__version__,
            environment=head.environment,
            model=head.model,
            prompts=self._prompts,
            certificate=AttributionCertificate(
                residual=residual, tolerance=head.tolerance, exact=residual <= head.tolerance
            ),
            held=head.held,
            attribution=self._attribution,
            continuations=self._continuations,
            summary=self._summary(),
            skipped=head.skipped,
            warnings=head.warnings,
            run=run,
        )

    def _summary(self) -> Summary | None:
        """Means over predictions; None for a single prediction."""
        found, count = self._attribution, len(self._attribution)
        if count < 2:
            return None
        blocks = len(found[0].parts.static.blocks)
        units = [0.0] * blocks
        encoder = [None if one.parts.encoder is None else one.parts.encoder.value for one in found]
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
            encoder=None if None in encoder else sum(value for value in encoder if value is not None) / count,
            heads=self._leading(heads=True),
            neurons=self._leading(heads=False),
        )

    def _leading(self, *, heads: bool) -> list[Spread]:
        found: list[Spread] = []
        for (block, unit), moments in self._sums.items():
            if (unit is None) is not heads:
                continue
            mean, absolute, square = (one / moments.count for one in moments.three())
            deviation, inside = (square - mean.square()).clamp_min(0).sqrt(), moments.in_expert
            for place in largest(absolute, self._top):
                found.append(
                    Spread(
                        block=block,
                        unit=unit,
                        expert=None if inside is None else place // inside,
                        index=place if inside is None else place % inside,
                        mean=float(mean[place]),
                        mean_absolute=float(absolute[place]),
                        deviation=float(deviation[place]),
                    )
                )
        return sorted(found, key=lambda one: (-one.mean_absolute, one.block, one.unit or 0))[: self._top]

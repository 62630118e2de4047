"""The responses of all terms to K probes of the output, random directions whose gradients are carried back once.

r_k(t) = ⟨∂⟨v_k, out⟩/∂(site), t⟩, summed over the tokens of the term's site. Responses are linear in terms: the
response of a set is the sum of its terms' responses, so that what cancels in the model cancels in the prediction. Cost
grows with the number of probes and of tokens, not with the number of terms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.prune.terms.damage import Metric
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models.arrays import wide
from duat_cli.models.budgets import probes_at_once, pulled_at_once
from duat_cli.models.discovery.modality import Given
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.gradients import Backward, BlockGradient
from duat_cli.models.sweep.lockstep import Weights, one_by_one
from duat_cli.models.sweep.passes import Means, Recorded, Removals
from duat_cli.models.terms.sites import BlockSites, Sites, TermId

SEED = 29
PRODUCT_ELEMENTS = 1 << 20  # elements of gradients times values at once, as many as the cache holds


@dataclass(frozen=True)
class TermList:
    """The terms of some kinds in a model, in a fixed order, each with its place in vectors (terms,)."""

    ids: list[TermId]
    starts: dict[tuple[Kind, int], int]  # (kind, block call) -> place of its first term

    @classmethod
    def of(cls, structure: ModelStructure, sites: Sites, kinds: Sequence[Kind]) -> TermList:
        ids: list[TermId] = []
        starts: dict[tuple[Kind, int], int] = {}
        for kind in kinds:
            for number, module in enumerate(structure.calls):
                starts[kind, number] = len(ids)
                count = sites[module].count(kind)
                ids += [TermId(kind, number, None if kind == "block" else k) for k in range(count)]
        return cls(ids, starts)

    def places(self, kind: Kind) -> range:
        """Places of the terms of one kind."""
        return self._ranges.get(kind, range(0))

    @functools.cached_property
    def _ranges(self) -> dict[Kind, range]:
        kinds = [term.kind for term in self.ids]
        starts = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        return {kind: range(start, start + kinds.count(kind)) for kind, start in starts.items()}


def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal probes, (count, ...); they do not depend on how many are drawn at once."""
    found = torch.empty(shape)
    for one in found:
        one.normal_(generator=generator)
    return found


@dataclass(frozen=True)
class Without:
    """Terms that are gone already when the responses of the others are computed."""

    gone: Removals
    output: Tensor
    """Output of the whole model, from which the damage is counted."""


class Responses:
    """The responses of all terms to `count` probes of one prompt, in pieces of some probes where all would not fit.

    means: values that stand in for removed terms; responses are then to the terms' deviations from them.
    """

    def __init__(
        self,
        structure: ModelStructure,
        sites: Sites,
        metric: Metric,
        given: Given,
        recorded: Recorded,
        terms: TermList,
        count: int,
        seed: int,
        means: Means | None = None,
        weights: Weights | None = None,
        without: Without | None = None,
    ) -> None:
        """weights: as for `BlockPass`. without: terms that were gone when `recorded` was recorded; the first response
        is then to the slope of the damage there."""
        self._metric, self._given, self._terms, self._means = metric, given, terms, means
        self._output, self._without = recorded.output, without
        self._noise = functools.partial(noise, generator=torch.Generator().manual_seed(SEED + seed))
        kinds = {kind for kind, _ in terms.starts}
        watched = {
            module: BlockSites(tuple(s for s in found.sites if s.kind in kinds), found.reasons)
            for module, found in sites.items()
        }
        self._blocks = len(recorded.calls)
        self._rows: list[Tensor] = []  # one per piece, (probes, terms)
        self.pieces = [
            Backward(
                structure,
                watched,
                metric.forward(given),
                recorded,
                functools.partial(self._probes, size),
                weights,
                None if without is None else without.gone,
            )
            # without probes one empty piece, because there may be a direction of first order
            for size in list(_sizes(count, pulled_at_once(recorded.calls[-1].after.numel()))) or [0]
        ]

    def _probes(self, count: int) -> Iterator[Tensor]:
        """The probes of the next piece, some at a time; they are drawn in the order of the pieces."""
        first = None if self._rows else self._first_order()
        self._rows.append(torch.zeros(count + (first is not None), len(self._terms.ids)))
        if first is not None:
            yield first[None]
        for size in _sizes(count, probes_at_once(self._output.numel())):
            yield self._metric.probes(self._output, self._given, self._noise, size)

    def _first_order(self) -> Tensor | None:
        if self._without is None:
            return self._metric.first_order(self._output, self._given)
        return self._metric.slope(self._without.output, self._output, self._given)

    def alone(self) -> Tensor:
        """Runs one piece after the other through all blocks, and returns the responses, (probes, terms)."""
        for place, piece in enumerate(self.pieces):
            one_by_one([piece])
            for number in reversed(range(self._blocks)):
                self.through(number, place)
        return self.found()

    def through(self, number: int, piece: int) -> None:
        """Carries one piece back through one block."""
        for block in self.pieces[piece].through(number):
            _gather(block, self._terms, self._rows[piece], self._means)

    def found(self) -> Tensor:
        """The responses, (probes, terms) float32, once all pieces are through all blocks. Raises UnsupportedModelError
        where the gradients of the model are not finite."""
        found = torch.cat(self._rows)
        if not bool(torch.isfinite(found).all()):
            dtype = str(self._output.dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"the gradients of this model's output are not finite in {dtype}, so what its terms do cannot be "
                "estimated; another --dtype may help"
            )
        return found


def _sizes(count: int, most: int) -> Iterator[int]:
    """Sizes of the pieces of `count`, `most` at a time."""
    for first in range(0, count, most):
        yield min(most, count - first)


def _gather(block: BlockGradient, terms: TermList, found: Tensor, means: Means | None) -> None:
    rows = block.probes
    for at in block.sites:
        value = at.value if means is None else at.value - means[block.number, at.site].to(at.value)
        # some probes at a time, for the memory; not in place: gradients may share it
        some = max(1, PRODUCT_ELEMENTS // value.numel())
        sums = torch.cat([at.site.collect(wide(g) * wide(value), at.index) for g in at.gradient.split(some)])
        first = terms.starts[at.site.kind, block.number] + at.site.offset
        found[rows, first : first + at.site.count] += sums.float().cpu()
    place = terms.starts.get(("block", block.number))
    if place is not None:
        change = wide(block.call.after) - wide(block.call.before)
        if means is not None:
            change = change - means[block.number, None].to(change)
        found[rows, place] += (wide(block.after) * change).flatten(1).sum(dim=1).float().cpu()

"""The largest set of one kind within a budget.

Terms are ordered by their own predicted damage; the sets are the beginnings of that order, so they are nested. A set's
prediction sums responses before squaring, so what cancels counts. Sets are chosen by their measured mean damage on
the prompts of the report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.prune.terms.ablation import Ablator, Tick, measured
from duat_cli.analysis.prune.terms.damage import Metric
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId

CURVE_POINTS = 10
BEYOND = 2.0  # the curve goes on to this multiple of the budget


@dataclass(frozen=True)
class Point:
    """One of the nested sets."""

    removed: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Nested:
    """The order in which terms of one kind go, and how far that may be taken."""

    kind: Kind
    order: list[TermId]
    curve: list[Point]
    chosen: Point | None  # the largest measured set within the budget
    step: int = 1  # terms that go together


def predicted_curve(metric: Metric, responses: Sequence[Tensor], order: Tensor) -> Tensor:
    """The predicted mean damage of the first m of `order`, for m = 1 … len(order). responses: (probes, terms) each."""
    total = torch.zeros(len(order), dtype=torch.float64)
    for one in responses:
        together = one[:, order].double().cumsum(dim=1)
        total += metric.of_set(together[None])[0]
    return total / len(responses)


@dataclass(frozen=True)
class Candidates:
    """The sets of one kind that are worth measuring."""

    kind: Kind
    order: list[TermId]
    sizes: list[int]
    predicted: list[float]  # of each size
    step: int = 1  # terms that go together

    @property
    def sets(self) -> list[list[TermId]]:
        return [self.order[:size] for size in self.sizes]

    def nested(self, means: Sequence[float], budget: float) -> Nested:
        """The sets with what was measured of each, a mean over prompts."""
        points = [Point(*three) for three in zip(self.sizes, self.predicted, means, strict=True)]
        chosen = None
        for point in points:  # a larger set only if every smaller one is within the budget too
            if not point.measured <= budget:
                break
            chosen = point
        return Nested(self.kind, self.order, points, chosen, self.step)


def candidates(
    metric: Metric,
    terms: TermList,
    kind: Kind,
    damage: Tensor,
    responses: Sequence[Tensor],
    budget: float,
    *,
    uniform: bool = False,
) -> Candidates:
    """The sets of one kind to be measured; never all blocks. damage: predicted, for every term. uniform: of neurons,
    as many of every FFN, and never all of one."""
    here = terms.places(kind)
    order = damage[here].argsort() + here.start
    # Without its last block no model is left: that set can be measured, but neither exported nor written.
    most, step = len(order) - (kind == "block"), 1
    if uniform and kind == "neuron":
        order, step, rounds = _in_rounds(terms, order)
        most = step * (rounds - 1)
    names = [terms.ids[k] for k in order.tolist()]
    if most < 1:
        return Candidates(kind, names, [], [], step)
    curve = predicted_curve(metric, responses, order[:most])
    sizes = _sizes(curve, budget, step)
    return Candidates(kind, names, sizes, [float(curve[size - 1]) for size in sizes], step)


def _in_rounds(terms: TermList, order: Tensor) -> tuple[Tensor, int, int]:
    """The least damaging term of every block, the next of every block, and so on, as long as all blocks have one, and
    then the others; how many a round has, and how many rounds there are."""
    by_block: dict[int, list[int]] = defaultdict(list)
    for place in order.tolist():
        by_block[terms.ids[place].block].append(place)
    rounds = list(zip(*(by_block[block] for block in sorted(by_block)), strict=False))
    first = [place for one in rounds for place in one]
    rest = [place for places in by_block.values() for place in places[len(rounds) :]]
    return torch.tensor(first + rest, dtype=torch.long), len(by_block), len(rounds)


def nested_sets(
    ablator: Ablator,
    terms: TermList,
    kind: Kind,
    damage: Tensor,
    responses: Sequence[Tensor],
    prompts: Sequence[Prompt],
    budget: float,
    tick: Tick,
    *,
    uniform: bool = False,
) -> Nested:
    """The nested sets of one kind, some of them measured, one prompt after the other. uniform: as of `candidates`."""
    found = candidates(ablator.metric, terms, kind, damage, responses, budget, uniform=uniform)
    means = measured(ablator, prompts, found.sets, tick).mean(dim=1).tolist() if found.sizes else []
    return found.nested(means, budget)


def _sizes(curve: Tensor, budget: float, step: int) -> list[int]:
    """Sizes worth measuring, multiples of the step: evenly up to where the prediction leaves the picture, and the
    smallest set."""
    outside = (curve > BEYOND * budget).nonzero()
    last = int(outside[0]) + 1 if len(outside) else len(curve)
    steps = {round(last * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    inside = (curve > budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest that the prediction puts within the budget
    return sorted({max(step, size - size % step) for size in steps | edge | {1}})

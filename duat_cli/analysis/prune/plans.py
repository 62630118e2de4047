"""The largest set of one kind within a budget, and what can be guaranteed of it.

Terms are ordered by their own predicted damage; the sets are the beginnings of that order, so they are nested. A set's
prediction sums responses before squaring, so what cancels counts. Sets are chosen by their measured mean damage on
the prompts of the report; the guarantee then tests some of them, from the smallest, on prompts held out from all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.prune.ablation import Ablator, Tick, measured
from duat_cli.analysis.prune.damage import Metric
from duat_cli.analysis.prune.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId
from duat_cli.statistics.binomial import NestedChoice, allowed, choose_nested

CURVE_POINTS = 10
TESTED_SETS = 4
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


def predicted_curve(metric: Metric, responses: Sequence[Tensor], order: Tensor) -> Tensor:
    """The predicted mean damage of the first m of `order`, for m = 1 … len(order). responses: (probes, terms) each."""
    total = torch.zeros(len(order), dtype=torch.float64)
    for one in responses:
        together = one[:, order].double().cumsum(dim=1)
        total += metric.of_set(together[None])[0]
    return total / len(responses)


def nested_sets(
    ablator: Ablator,
    terms: TermList,
    kind: Kind,
    damage: Tensor,
    responses: Sequence[Tensor],
    prompts: Sequence[Prompt],
    budget: float,
    tick: Tick,
) -> Nested:
    """The nested sets of one kind, some of them measured; never all blocks. damage: predicted, for every term."""
    here = terms.places(kind)
    order = damage[here].argsort() + here.start
    names = [terms.ids[k] for k in order.tolist()]
    # Without its last block no model is left: that set can be measured, but neither exported nor written.
    most = len(names) - 1 if kind == "block" else len(names)
    if most < 1:
        return Nested(kind, names, [], None)
    curve = predicted_curve(ablator.metric, responses, order[:most])
    sizes = _sizes(curve, budget)
    means = measured(ablator, prompts, [names[:size] for size in sizes], tick).mean(dim=1).tolist()
    points = [Point(size, float(curve[size - 1]), mean) for size, mean in zip(sizes, means, strict=True)]
    chosen = None
    for point in points:  # a larger set only if every smaller one is within the budget too
        if not point.measured <= budget:
            break
        chosen = point
    return Nested(kind, names, points, chosen)


def _sizes(curve: Tensor, budget: float) -> list[int]:
    """Sizes worth measuring: even steps up to where the prediction leaves the picture, and the smallest sets."""
    outside = (curve > BEYOND * budget).nonzero()
    last = int(outside[0]) + 1 if len(outside) else len(curve)
    steps = {round(last * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    inside = (curve > budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest that the prediction puts within the budget
    return sorted(size for size in steps | edge | {1} if size >= 1)


def guaranteed(
    ablator: Ablator,
    nested: Nested,
    held_out: Sequence[Prompt],
    budget: float,
    share: float,
    confidence: float,
    tick: Tick,
) -> tuple[NestedChoice, list[int]]:
    """Nested sets up to the chosen one, tested in order on held-out prompts; the sizes that were to be tested.

    A set that has exceeded the budget too often has failed, and every larger one with it: those are run no more.
    """
    assert nested.chosen is not None
    largest = nested.chosen.removed
    sizes = sorted({max(1, round(largest * k / TESTED_SETS)) for k in range(1, TESTED_SETS + 1)})
    most = allowed(len(held_out), share, confidence) or 0
    exceeded = [0] * len(sizes)
    alive = len(sizes)
    removals = [ablator.removals(nested.order[:size]) for size in sizes]
    for p, prompt in enumerate(held_out):
        ids = ablator.place(prompt)
        recorded = ablator.record(ids)
        for k in range(alive):
            exceeded[k] += ablator.damage(recorded, ids, removals[k]) > budget
            tick(p * len(sizes) + k + 1, len(sizes) * len(held_out))
        alive = next((k + 1 for k in range(alive) if exceeded[k] > most), alive)
    return choose_nested(exceeded[:alive], len(held_out), share, confidence), sizes

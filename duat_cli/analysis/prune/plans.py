"""The largest set of one kind within a budget, and what can be guaranteed of it.

Terms are ordered by their own predicted damage; the sets are the beginnings of that order, so they are nested. A set's
prediction sums responses before squaring, so what cancels counts. Sets are chosen by their measured mean damage on
the prompts of the report; the guarantee then tests some of them, from the smallest, on prompts held out from all that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.prune.ablation import WAVE_BYTES, Ablation, Ablator, Tick, measured
from duat_cli.analysis.prune.damage import Metric
from duat_cli.analysis.prune.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.prompts import Prompt
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import Leading, Recorded
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


@dataclass(frozen=True)
class Candidates:
    """The sets of one kind that are worth measuring."""

    kind: Kind
    order: list[TermId]
    sizes: list[int]
    predicted: list[float]  # of each size

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
        return Nested(self.kind, self.order, points, chosen)


def candidates(
    metric: Metric, terms: TermList, kind: Kind, damage: Tensor, responses: Sequence[Tensor], budget: float
) -> Candidates:
    """The sets of one kind to be measured; never all blocks. damage: predicted, for every term."""
    here = terms.places(kind)
    order = damage[here].argsort() + here.start
    names = [terms.ids[k] for k in order.tolist()]
    # Without its last block no model is left: that set can be measured, but neither exported nor written.
    most = len(names) - 1 if kind == "block" else len(names)
    if most < 1:
        return Candidates(kind, names, [], [])
    curve = predicted_curve(metric, responses, order[:most])
    sizes = _sizes(curve, budget)
    return Candidates(kind, names, sizes, [float(curve[size - 1]) for size in sizes])


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
    """The nested sets of one kind, some of them measured, one prompt after the other."""
    found = candidates(ablator.metric, terms, kind, damage, responses, budget)
    means = measured(ablator, prompts, found.sets, tick).mean(dim=1).tolist() if found.sizes else []
    return found.nested(means, budget)


def _sizes(curve: Tensor, budget: float) -> list[int]:
    """Sizes worth measuring: even steps up to where the prediction leaves the picture, and the smallest sets."""
    outside = (curve > BEYOND * budget).nonzero()
    last = int(outside[0]) + 1 if len(outside) else len(curve)
    steps = {round(last * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    inside = (curve > budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest that the prediction puts within the budget
    return sorted(size for size in steps | edge | {1} if size >= 1)


class Trial:
    """Nested sets up to the chosen one, tested in order on held-out prompts.

    A set that has exceeded the budget too often has failed, and every larger one with it: those are run no more.
    """

    def __init__(self, nested: Nested, prompts: int, budget: float, share: float, confidence: float) -> None:
        assert nested.chosen is not None
        self._order, self._prompts, self._budget = nested.order, prompts, budget
        self._share, self._confidence = share, confidence
        largest = nested.chosen.removed
        self.sizes = sorted({max(1, round(largest * k / TESTED_SETS)) for k in range(1, TESTED_SETS + 1)})
        self._most = allowed(prompts, share, confidence) or 0
        self._exceeded = [0] * len(self.sizes)
        self.alive = len(self.sizes)

    @property
    def sets(self) -> list[list[TermId]]:
        return [self._order[:size] for size in self.sizes]

    def count(self, damage: Callable[[int], float]) -> None:
        """One prompt; damage(number of a set): of those that are run."""
        for k in range(self.alive):
            self._exceeded[k] += damage(k) > self._budget
        self.alive = next((k + 1 for k in range(self.alive) if self._exceeded[k] > self._most), self.alive)

    def choice(self) -> NestedChoice:
        """Once all prompts are counted."""
        return choose_nested(self._exceeded[: self.alive], self._prompts, self._share, self._confidence)


def try_alone(ablator: Ablator, trial: Trial, held_out: Sequence[Prompt], tick: Tick) -> None:
    """The trial, one prompt after the other."""
    removals = [ablator.removals(terms) for terms in trial.sets]
    for p, prompt in enumerate(held_out):
        ids = ablator.place(prompt)
        recorded = ablator.record(ids)

        def damage(k: int, p: int = p, ids: Tensor = ids, recorded: Recorded = recorded) -> float:
            tick(p * len(removals) + k + 1, len(removals) * len(held_out))
            return ablator.damage(recorded, ids, removals[k])

        trial.count(damage)


def try_together(
    ablator: Ablator, trials: Sequence[Trial], held_out: Sequence[Prompt], run: Callable[[Sequence[Pass]], None]
) -> None:
    """The same of several trials side by side, as many prompts at a time as fit; `run` runs passes so.

    A prompt's own pass goes one block ahead of those that take something out of it. A set that fails is still run on
    the prompts beside the one that it fails on, and not counted there.
    """
    removals = [[ablator.removals(terms) for terms in trial.sets] for trial in trials]
    left = list(held_out)
    while left and trials:
        passes: list[Pass] = []
        found: list[list[list[Ablation]]] = []  # a prompt, a trial, a set
        size = 0
        while left and (not found or size + found[-1][0][0].size * sum(trial.alive for trial in trials) <= WAVE_BYTES):
            ids = ablator.place(left.pop(0))
            own = Leading(ablator.structure, ablator.metric.forward(ids))
            rows = [
                [ablator.ablation(own, own, ids, one) for one in some[: trial.alive]]
                for trial, some in zip(trials, removals, strict=True)
            ]
            found.append(rows)
            passes += [own, *(one for row in rows for one in row)]
            size += sum(one.size for row in rows for one in row)
        run(passes)
        for rows in found:
            for trial, row in zip(trials, rows, strict=True):
                trial.count(functools.partial(_damage_of, row))


def _damage_of(row: Sequence[Ablation], number: int) -> float:
    return row[number].damage

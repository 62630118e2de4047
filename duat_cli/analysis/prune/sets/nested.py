"""The largest set within a budget, or the smallest that holds a share of the parameters.

The sets are the beginnings of an order of terms, so they are nested. A set's prediction sums responses before
squaring, so what cancels counts. Sets are chosen by their measured mean damage on the prompts of the report.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duat_cli.analysis.prune.sets.path import Path, reaching
from duat_cli.analysis.prune.terms.ablation import Ablator, Tick, measured
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.model.processes import Each, in_turn
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.sets import SketchRound

BEYOND = 2.0  # the curve goes on to this multiple of the budget


@dataclass(frozen=True)
class Goal:
    """What a set is wanted for."""

    budget: float
    """The largest damage allowed."""
    points: int = 10
    """Sets that are measured, about."""
    parameters: float | None = None
    """How many parameters are to go, whatever the damage; None: as many as the budget allows."""


@dataclass(frozen=True)
class Point:
    """One of the nested sets."""

    removed: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Nested:
    """The order in which terms of some kinds go, and how far that may be taken."""

    kinds: tuple[Kind, ...]
    order: list[TermId]
    curve: list[Point]
    chosen: Point | None  # the largest measured set within the budget, or the one that was asked for
    ends: list[int] = field(default_factory=list)  # how many terms a set may have, rising; none: any number
    uniform: bool = False
    rounds: list[SketchRound] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The kinds, as --granularity takes them."""
        return ",".join(self.kinds)

    def sizes(self, most: int) -> list[int]:
        """How many terms a set of at most so many may have."""
        return [end for end in self.ends or range(1, most + 1) if end <= most]


@dataclass(frozen=True)
class Candidates:
    """The sets that are worth measuring."""

    kinds: tuple[Kind, ...]
    order: list[TermId]
    sizes: list[int]
    predicted: list[float]  # of each size
    ends: list[int]
    uniform: bool = False
    wanted: int | None = None  # the size that was asked for

    @property
    def sets(self) -> list[list[TermId]]:
        return [self.order[:size] for size in self.sizes]

    def nested(self, means: Sequence[float], budget: float, rounds: Sequence[SketchRound] = ()) -> Nested:
        """The sets with what was measured of each, a mean over prompts."""
        points = [Point(*three) for three in zip(self.sizes, self.predicted, means, strict=True)]
        chosen = None
        for point in points:  # a larger set only if every smaller one is within the budget too
            if self.wanted is None and not point.measured <= budget:
                break
            chosen = point if self.wanted in (None, point.removed) else chosen
        return Nested(self.kinds, self.order, points, chosen, self.ends, self.uniform, list(rounds))


def candidates(path: Path, terms: TermList, kinds: Sequence[Kind], parameters: Tensor, goal: Goal) -> Candidates:
    """The sets to be measured. parameters: of every term."""
    order = path.order
    names = [terms.ids[k] for k in order.places.tolist()]
    if not order.ends:
        return Candidates(tuple(kinds), names, [], [], [], order.uniform)
    wanted = None if goal.parameters is None else reaching(order, parameters, goal.parameters)
    sizes = _sizes(path.curve, order.ends, goal.budget, wanted, goal.points)
    predicted = [float(path.curve[size - 1]) for size in sizes]
    return Candidates(tuple(kinds), names, sizes, predicted, order.ends, order.uniform, wanted)


def within(path: Path, goal: Goal, parameters: Tensor) -> int:
    """The size that the goal asks for, by the prediction alone; 0 if there is none."""
    ends = path.order.ends
    if goal.parameters is not None:
        return reaching(path.order, parameters, goal.parameters)
    inside = [end for end in ends if float(path.curve[end - 1]) <= goal.budget]
    return inside[-1] if inside else 0


def nested_sets(
    ablator: Ablator,
    found: Sequence[tuple[Candidates, Sequence[SketchRound]]],
    prompts: Sequence[Prompt],
    budget: float,
    tick: Tick,
    each: Each = in_turn,
) -> list[Nested]:
    """The nested sets of several orders, some of each measured, one prompt after the other."""
    sets = [one for candidates, _ in found for one in candidates.sets]
    means = measured(ablator, prompts, sets, tick, each).mean(dim=1)
    rows = means.split([len(candidates.sizes) for candidates, _ in found])
    return [one.nested(mean.tolist(), budget, rounds) for (one, rounds), mean in zip(found, rows, strict=True)]


def _sizes(curve: Tensor, ends: Sequence[int], budget: float, wanted: int | None, points: int) -> list[int]:
    """Sizes worth measuring: evenly up to where the prediction leaves the picture, or to what was asked for, and the
    smallest set."""
    outside = (curve > BEYOND * budget).nonzero()
    last = wanted or (int(outside[0]) + 1 if len(outside) else len(curve))
    steps = {round(last * k / points) for k in range(1, points + 1)}
    inside = (curve > budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest that the prediction puts within the budget
    return sorted({_down(size, ends) for size in steps | {1} | {one for one in edge if one <= last}})


def _down(size: int, ends: Sequence[int]) -> int:
    """The largest set that is no larger; the smallest if there is none."""
    return ends[max(0, bisect.bisect_right(ends, size) - 1)]

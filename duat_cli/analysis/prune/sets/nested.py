"""The largest set within a budget, or the smallest that holds a share of the parameters.

The sets are the beginnings of an order of terms, so they are nested. A set's prediction sums responses before
squaring, so what cancels counts. Sets are chosen by their measured mean damage on the prompts of the report.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duat_cli.analysis.prune.sets.path import Path, reaching
from duat_cli.analysis.prune.terms.ablation import Effect
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
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
    moved: tuple[float, ...] = ()
    """Under each prompt, how far its removal moves the last block's output, relative to that output."""


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
    def name(self) -> str:
        """As of `Nested`."""
        return ",".join(self.kinds)

    @property
    def sets(self) -> list[list[TermId]]:
        return [self.order[:size] for size in self.sizes]

    def likely(self, budget: float, most: int) -> list[int]:
        """Sizes of those that are most likely to be chosen, as the prediction has it: the largest that it puts within
        the budget and those beside it, smaller ones first; or the one that was asked for."""
        if self.wanted is not None:
            return [self.wanted]
        beyond = next((k for k, value in enumerate(self.predicted) if value > budget), len(self.sizes))
        order = sorted(range(len(self.sizes)), key=lambda k: (abs(k + 1 - beyond), k))
        return [self.sizes[k] for k in order[:most]]

    def nested(self, effects: Sequence[Sequence[Effect]], budget: float, rounds: Sequence[SketchRound] = ()) -> Nested:
        """The sets with what was measured of each. effects: under every prompt, those of all sets."""
        points = [
            Point(size, predicted, statistics.fmean(one.damage for one in under), tuple(one.moved for one in under))
            for size, predicted, under in zip(self.sizes, self.predicted, zip(*effects, strict=True), strict=True)
        ]
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
    found: Sequence[tuple[Candidates, Sequence[SketchRound]]], effects: Sequence[Sequence[Effect]], budget: float
) -> dict[str, Nested]:
    """The nested sets of several orders, by their names. effects: under every prompt, those of all candidates."""
    nested, start = dict[str, Nested](), 0
    for one, rounds in found:
        end = start + len(one.sizes)
        nested[one.name] = one.nested([row[start:end] for row in effects], budget, rounds)
        start = end
    return nested


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

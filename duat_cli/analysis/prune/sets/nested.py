"""The largest set within a budget, or the smallest that holds a share of the parameters.

The sets are the beginnings of an order of terms, so they are nested. A set's prediction sums responses before
squaring, so what cancels counts. Sets are chosen by their measured mean damage on the prompts of the report.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.sets.order import Group
from duat_cli.analysis.prune.sets.path import Again, Path, Sketch, path_in_rounds, path_of
from duat_cli.analysis.prune.terms.ablation import Effect
from duat_cli.kinds import Kind
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.sets import SketchRound

Damages = Callable[[Sequence[Sequence[TermId]]], list[float]]
BEYOND = 2.0  # the curve goes on to this multiple of the budget


@dataclass(frozen=True)
class Point:
    """One of the nested sets."""

    removed: int
    predicted: float
    measured: float | None = None
    """None until it is."""
    moved: tuple[float, ...] = ()
    """Under each prompt, how far its removal moves the last block's output, relative to that output."""


@dataclass(frozen=True)
class Nested:
    """The order in which terms of some kinds go, and the sets of it that are worth measuring."""

    kinds: tuple[Kind, ...]
    order: list[TermId]
    curve: list[Point]
    chosen: Point | None = None  # the largest measured set within the budget, or the one that was asked for
    ends: list[int] = field(default_factory=list)  # how many terms a set may have, rising; none: any number
    uniform: bool = False
    rounds: list[SketchRound] = field(default_factory=list)
    wanted: int | None = None  # the size that was asked for

    @property
    def name(self) -> str:
        """The kinds, as --granularity takes them."""
        return ",".join(self.kinds)

    @property
    def sets(self) -> list[list[TermId]]:
        """Those of the curve."""
        return [self.order[: point.removed] for point in self.curve]

    def sizes(self, most: int) -> list[int]:
        """How many terms a set of at most so many may have."""
        return [end for end in self.ends or range(1, most + 1) if end <= most]

    def likely(self, budget: float, most: int) -> list[int]:
        """Sizes of those that are most likely to be chosen, as the prediction has it: the largest that it puts within
        the budget and those beside it, smaller ones first; or the one that was asked for."""
        if self.wanted is not None:
            return [self.wanted]
        beyond = next((k for k, point in enumerate(self.curve) if point.predicted > budget), len(self.curve))
        order = sorted(range(len(self.curve)), key=lambda k: (abs(k + 1 - beyond), k))
        return [self.curve[k].removed for k in order[:most]]

    def measured(self, effects: Sequence[Sequence[Effect]], budget: float) -> Nested:
        """With what was measured of each set, and one chosen. effects: under every prompt, those of all sets."""
        curve, chosen, within = list[Point](), None, True
        for point, under in zip(self.curve, zip(*effects, strict=True), strict=True):
            damage = statistics.fmean(one.damage for one in under)
            curve.append(replace(point, measured=damage, moved=tuple(one.moved for one in under)))
            within = within and damage <= budget  # a larger set only if every smaller one is within the budget too
            fits = within if self.wanted is None else point.removed == self.wanted
            if fits:
                chosen = curve[-1]
        return replace(self, curve=curve, chosen=chosen)


def chosen(group: Group, sketch: Sketch, again: Again, damages: Damages) -> Nested:
    """The sets to be measured: from one sketch, or from several with what they brought over one, as asked for.

    damages: what sets do, mean over the prompts.
    """
    single, parameters = path_of(group, sketch), group.sizes.parameters
    target = single.within(group)
    if group.options.rounds == 1 or not target:
        return nested_of(group, single)
    wanted = float(parameters[single.places[:target]].sum())
    if group.wanted is not None:  # the set of one round goes beyond that by a part of its last term
        wanted = min(wanted, group.wanted)
    path, stages = path_in_rounds(group, single, again, wanted)
    whole = path.reaching(parameters, wanted)
    ends = [*(end for end, _ in stages), whole]
    alone = [single.reaching(parameters, float(parameters[path.places[:end]].sum())) for end in ends]
    sets = [single.places[:size] for size in alone] + [path.places[:whole]]
    *singles, last = damages([[group.terms.ids[k] for k in places.tolist()] for places in sets])
    rounds = [
        SketchRound(removed=end, measured=here, single_removed=size, single_measured=there)
        for end, here, size, there in zip(ends, [*(damage for _, damage in stages), last], alone, singles, strict=True)
    ]
    return nested_of(group, path, rounds)


def nested_of(group: Group, path: Path, rounds: Sequence[SketchRound] = ()) -> Nested:
    """The sets of a path that are to be measured. rounds: what it came about in, if several."""
    order = [group.terms.ids[k] for k in path.places.tolist()]
    wanted = path.within(group) if path.ends and group.wanted is not None else None
    sizes = _sizes(path, group.options, wanted) if path.ends else []
    curve = [Point(size, float(path.curve[size - 1])) for size in sizes]
    return Nested(group.kinds, order, curve, None, path.ends, group.uniform, list(rounds), wanted)


def measured_sets(found: Sequence[Nested], effects: Sequence[Sequence[Effect]], budget: float) -> dict[str, Nested]:
    """The nested sets of several orders with what was measured, by their names. effects: under every prompt, those of
    all their sets."""
    measured, start = dict[str, Nested](), 0
    for one in found:
        end = start + len(one.curve)
        measured[one.name] = one.measured([row[start:end] for row in effects], budget)
        start = end
    return measured


def _sizes(path: Path, options: PruneOptions, wanted: int | None) -> list[int]:
    """Sizes worth measuring: evenly up to where the prediction leaves the picture, or to what was asked for, and the
    smallest set."""
    outside = (path.curve > BEYOND * options.budget).nonzero()
    last = wanted or (int(outside[0]) + 1 if len(outside) else len(path.curve))
    points = options.spent.points
    steps = {round(last * k / points) for k in range(1, points + 1)}
    inside = (path.curve > options.budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest that the prediction puts within the budget
    return sorted({_down(size, path.ends) for size in steps | {1} | {one for one in edge if one <= last}})


def _down(size: int, ends: Sequence[int]) -> int:
    """The largest set that is no larger; the smallest if there is none."""
    return ends[max(0, bisect.bisect_right(ends, size) - 1)]

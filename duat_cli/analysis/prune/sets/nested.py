"""The largest set within a budget, or the smallest that holds a share of the parameters.

The sets are prefixes of an order of terms, so they are nested. The prediction of a set sums responses before squaring,
so that cancellation between terms counts. Sets are chosen by their measured mean damage on the prompts of the report.
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
BEYOND = 2.0  # the curve extends to this multiple of the budget


@dataclass(frozen=True)
class Point:
    """One of the nested sets."""

    removed: int
    predicted: float
    measured: float | None = None
    """Measured mean damage; None until measured."""
    moved: tuple[float, ...] = ()
    """How far removal moves the last block's output, relative to that output, under each prompt."""


@dataclass(frozen=True)
class Nested:
    """The order in which terms of some kinds are removed, and those of its sets that are worth measuring."""

    kinds: tuple[Kind, ...]
    order: list[TermId]
    curve: list[Point]
    chosen: Point | None = None  # the largest measured set within the budget, or the one that was asked for
    ends: list[int] = field(default_factory=list)  # allowed sizes of sets, rising; empty: any size
    uniform: bool = False
    rounds: list[SketchRound] = field(default_factory=list)
    wanted: int | None = None  # the size that was asked for

    @property
    def name(self) -> str:
        """The kinds, written as for --granularity."""
        return ",".join(self.kinds)

    @property
    def sets(self) -> list[list[TermId]]:
        """The sets of the curve."""
        return [self.order[: point.removed] for point in self.curve]

    def sizes(self, most: int) -> list[int]:
        """The allowed sizes of sets, up to `most`."""
        return [end for end in self.ends or range(1, most + 1) if end <= most]

    def likely(self, budget: float, most: int) -> list[int]:
        """Sizes of the `most` sets most likely to be chosen by the prediction: the largest predicted to be within the
        budget and those beside it, smaller ones first; or only the size that was asked for."""
        if self.wanted is not None:
            return [self.wanted]
        beyond = next((k for k, point in enumerate(self.curve) if point.predicted > budget), len(self.curve))
        order = sorted(range(len(self.curve)), key=lambda k: (abs(k + 1 - beyond), k))
        return [self.curve[k].removed for k in order[:most]]

    def measured(self, effects: Sequence[Sequence[Effect]], budget: float) -> Nested:
        """A copy with each set's measurements and with one chosen. effects: for every prompt, those of all sets."""
        curve, chosen, within = list[Point](), None, True
        for point, under in zip(self.curve, zip(*effects, strict=True), strict=True):
            damage = statistics.fmean(one.damage for one in under)
            curve.append(replace(point, measured=damage, moved=tuple(one.moved for one in under)))
            within = within and damage <= budget  # a set counts only if every smaller one is within the budget too
            fits = within if self.wanted is None else point.removed == self.wanted
            if fits:
                chosen = curve[-1]
        return replace(self, curve=curve, chosen=chosen)


def chosen(group: Group, sketch: Sketch, again: Again, damages: Damages) -> Nested:
    """The sets to be measured: by one sketch or, as asked for, in several rounds, compared with a single one.

    damages: gives the damage of sets, mean over the prompts.
    """
    single, parameters = path_of(group, sketch), group.sizes.parameters
    target = single.within(group)
    if group.options.rounds == 1 or not target:
        return nested_of(group, single)
    wanted = float(parameters[single.places[:target]].sum())
    if group.wanted is not None:  # the set of one round holds more than was asked for, by a part of its last term
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
    """The sets of a path that are to be measured. rounds: those in which the path was made, if several."""
    order = [group.terms.ids[k] for k in path.places.tolist()]
    wanted = path.within(group) if path.ends and group.wanted is not None else None
    sizes = _sizes(path, group.options, wanted) if path.ends else []
    curve = [Point(size, float(path.curve[size - 1])) for size in sizes]
    return Nested(group.kinds, order, curve, None, path.ends, group.uniform, list(rounds), wanted)


def measured_sets(found: Sequence[Nested], effects: Sequence[Sequence[Effect]], budget: float) -> dict[str, Nested]:
    """The nested sets of several orders with their measurements, by name. effects: for every prompt, those of all sets
    of all orders, in turn."""
    measured, start = dict[str, Nested](), 0
    for one in found:
        end = start + len(one.curve)
        measured[one.name] = one.measured([row[start:end] for row in effects], budget)
        start = end
    return measured


def _sizes(path: Path, options: PruneOptions, wanted: int | None) -> list[int]:
    """Sizes worth measuring: the smallest, evenly spaced ones up to where the prediction exceeds BEYOND budgets or to
    `wanted`, and the largest that is predicted to be within the budget."""
    outside = (path.curve > BEYOND * options.budget).nonzero()
    last = wanted or (int(outside[0]) + 1 if len(outside) else len(path.curve))
    points = options.spent.points
    steps = {round(last * k / points) for k in range(1, points + 1)}
    inside = (path.curve > options.budget).nonzero()
    edge = {int(inside[0])} if len(inside) else set()  # the largest size predicted to be within the budget
    return sorted({_down(size, path.ends) for size in steps | {1} | {one for one in edge if one <= last}})


def _down(size: int, ends: Sequence[int]) -> int:
    """The largest allowed size that is at most `size`; the smallest if there is none."""
    return ends[max(0, bisect.bisect_right(ends, size) - 1)]

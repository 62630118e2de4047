"""Damage on held-out prompts of sets that other criteria choose, beside duat's own and random ones of the same size.

Every set is made by the rules for duat's own (`order.order_of`): it never has all blocks, with --uniform it has equally
many terms of every layer, and it holds as many parameters as duat's set, to within a term. A criterion of neurons,
heads or experts is used twice, since some are made to compare terms of one layer: with the same share of every layer,
and with all terms in one order (by score per parameter with several kinds).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.plan.task import RANDOM_SETS, besides
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.order import Group, order_of
from duat_cli.analysis.prune.sets.trial import Trial
from duat_cli.analysis.prune.terms.criteria import Scores
from duat_cli.analysis.prune.terms.responses import SEED
from duat_cli.kinds import WHOLE
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.rivals import Allocation, CriterionSet
from duat_cli.statistics.ranking import Estimate, bootstrap

OURS, RANDOM = "duat", "random"
# Gromov et al. choose by the angle between the two ends of a run of neighbouring blocks; the angle of a single block
# tells which one block to remove, but no set
OF_ONE_BLOCK = ("angular",)
ONE_SET = "one set alone"
NO_DAMAGE = "duat's set does no damage on these prompts, or on some resample of them none"


@dataclass(frozen=True)
class _Rival:
    """The sets that one criterion chose beside one of duat's sets."""

    beside: int
    criterion: str
    allocation: Allocation
    numbers: list[int]
    """Numbers of its sets among those that are run."""
    removed: float
    parameters: float
    """Terms and parameters removed, both means over its sets."""


class Rivals:
    """The sets of all criteria beside those of one order. They run beside its trial, on every held-out prompt."""

    def __init__(
        self, nested: Nested, group: Group, layers: Sequence[range], scores: Scores, sizes: Sequence[int]
    ) -> None:
        """layers: places in the term list of the terms that share a layer. sizes: of duat's sets that others are put
        beside. Criteria that have no score for some of the group's terms are left out."""
        self._group = group
        self._whole: Allocation = "uniform" if group.uniform else "one order"
        self.sets: list[list[TermId]] = []
        """Every set once, even if several criteria chose it."""
        self._known: dict[frozenset[int], int] = {}
        self._rivals: list[_Rival] = []
        places = {term: place for place, term in enumerate(group.terms.ids)}
        own = torch.tensor([places[term] for term in nested.order], dtype=torch.long)
        orders = self._orders(layers, scores)
        for size in sizes:
            self._add(size, OURS, self._whole, [own[:size]])
            wanted = float(group.sizes.parameters[own[:size]].sum())
            for criterion, allocation, found in orders:
                self._add(size, criterion, allocation, [self._nearest(*one, wanted) for one in found])
        self.damages: list[list[float]] = [[] for _ in self.sets]
        """Damage of each set on the prompts so far."""

    @property
    def running(self) -> list[int]:
        """Numbers of all sets: none is tested, so none fails."""
        return list(range(len(self.sets)))

    def add(self, number: int, damage: float) -> None:
        """Adds the damage of a set on one more prompt."""
        self.damages[number].append(damage)

    def rows(self, confidence: float) -> list[CriterionSet]:
        """The rows of the report, for each size duat's own set first."""
        means = torch.tensor(self.damages, dtype=torch.float64)  # (sets, prompts)
        found, own = list[CriterionSet](), means[0]
        for one in self._rivals:
            mine = means[one.numbers]
            if one.criterion == OURS:
                own = mine[0]
            each = mine.mean(dim=1).tolist()
            ratio = _ratio(mine.mean(dim=0), own, confidence)
            several = len(each) > 1
            found.append(
                CriterionSet.explained(
                    ONE_SET,
                    dict.fromkeys(("ratio", "ratio_low", "ratio_high"), NO_DAMAGE),
                    beside=one.beside,
                    criterion=one.criterion,
                    allocation=one.allocation,
                    sets=len(each),
                    removed=round(one.removed),
                    parameters=round(one.parameters),
                    prompts=mine.shape[1],
                    mean=statistics.fmean(each),
                    percentile_90=float(mine.flatten().quantile(0.9)),
                    lowest=min(each) if several else None,
                    highest=max(each) if several else None,
                    ratio=None if ratio is None else ratio.value,
                    ratio_low=None if ratio is None else ratio.low,
                    ratio_high=None if ratio is None else ratio.high,
                )
            )
        return found

    def _orders(
        self, layers: Sequence[range], scores: Scores
    ) -> list[tuple[str, Allocation, list[tuple[Tensor, list[int]]]]]:
        """Each criterion, how it is used, and its orders with the allowed sizes of their sets."""
        group, held = self._group, self._group.held
        members = [place for kind in group.kinds for place in group.terms.places(kind)]
        found = list[tuple[str, Allocation, list[tuple[Tensor, list[int]]]]]()
        for criterion, score in scores.items():
            if criterion in OF_ONE_BLOCK or not bool(torch.isfinite(score[members]).all()):
                continue
            found.append((criterion, self._whole, [self._order(score)]))
            if not group.uniform and not set(group.kinds) & WHOLE:
                share = torch.full_like(held, math.nan)
                for layer in layers:
                    mine = score[layer.start : layer.stop]
                    share[layer.start : layer.stop] = (mine.argsort(stable=True).argsort() + 0.5) / len(mine)
                # times `held`, because an order of several kinds divides by it
                found.append((criterion, "same share of layers", [self._order(share * held)]))
        generator = torch.Generator().manual_seed(SEED)
        drawn = [torch.rand(len(held), dtype=torch.float64, generator=generator) * held for _ in range(RANDOM_SETS)]
        found.append((RANDOM, self._whole, [self._order(one) for one in drawn]))
        return found

    def _order(self, score: Tensor) -> tuple[Tensor, list[int]]:
        """The order by score, least first. score: of every term in the list."""

        def of(units: Sequence[Sequence[int]]) -> Tensor:
            places = torch.tensor([place for unit in units for place in unit], dtype=torch.long)
            owner = torch.repeat_interleave(torch.arange(len(units)), torch.tensor([len(unit) for unit in units]))
            return torch.zeros(len(units), dtype=torch.float64).index_add_(0, owner, score[places].double())

        return order_of(self._group, of, (), None)

    def _nearest(self, order: Tensor, ends: Sequence[int], wanted: float) -> Tensor:
        """The set of an order whose number of parameters is nearest to `wanted`."""
        held = self._group.sizes.parameters[order].cumsum(dim=0)
        return order[: ends[int((held[[end - 1 for end in ends]] - wanted).abs().argmin())]]

    def _add(self, beside: int, criterion: str, allocation: Allocation, sets: Sequence[Tensor]) -> None:
        """Adds what a criterion chose; a set that is known already is not run again."""
        numbers = []
        for places in sets:
            key = frozenset(places.tolist())
            if key not in self._known:
                self._known[key] = len(self.sets)
                self.sets.append([self._group.terms.ids[place] for place in places.tolist()])
            numbers.append(self._known[key])
        removed = statistics.fmean(len(places) for places in sets)
        parameters = statistics.fmean(float(self._group.sizes.parameters[places].sum()) for places in sets)
        self._rivals.append(_Rival(beside, criterion, allocation, numbers, removed, parameters))


def rivals_of(
    nested: Mapping[str, Nested],
    groups: Sequence[Group],
    layers: Sequence[range],
    scores: Scores,
    trials: Mapping[str, Trial],
) -> dict[str, Rivals]:
    """The rivals of the sets of every trial, by the trials' names."""
    known = {group.name: group for group in groups}
    return {name: Rivals(nested[name], known[name], layers, scores, besides(one.sizes)) for name, one in trials.items()}


def _ratio(damage: Tensor, own: Tensor, confidence: float) -> Estimate | None:
    """Ratio of mean damages with its interval, from damages (prompts,) each; None where duat's own mean is not above 0
    in every resample."""

    def mean(x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        return (weights * x).sum(dim=-1) / weights.sum(dim=-1)

    least = bootstrap(mean, own, own, 1.0)  # draws the same resamples as the ratio below
    if least is None or least.low <= 0:
        return None
    return bootstrap(lambda x, y, w: mean(x, x, w) / mean(y, y, w), damage, own, confidence)

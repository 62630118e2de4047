"""From the responses of all terms to the sets that are worth measuring, sketched once or in several rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.sets.nested import Candidates, Goal, candidates, within
from duat_cli.analysis.prune.sets.order import Sizes
from duat_cli.analysis.prune.sets.path import Path, Sketch, path_in_rounds, path_of, reaching
from duat_cli.analysis.prune.terms.ablation import Ablator, Tick, effects_of
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.model.processes import Each, in_turn
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.sets import SketchRound


def sizes_of(
    model: nn.Module,
    structure: ModelStructure,
    parameters: Mapping[nn.Module, BlockParameters],
    terms: TermList,
    *,
    uniform: bool,
) -> Sizes:
    """What every term holds."""
    calls = structure.calls
    each = [float(parameters[calls[term.block]].each[term.kind][term.index or 0]) for term in terms.ids]
    blocks = sum(p.numel() for p in {p for call in calls for p in call.parameters()})
    every = sum(p.numel() for p in model.parameters())
    groups = tuple(parameters[call].group for call in calls)
    return Sizes(torch.tensor(each, dtype=torch.float64), (float(blocks), float(every)), groups, uniform)


Again = Callable[[Sequence[TermId]], Sketch]  # a sketch of the model without these terms


@dataclass(frozen=True)
class Chooser:
    """What sets are chosen by."""

    ablator: Ablator
    terms: TermList
    sketch: Sketch
    sizes: Sizes
    options: PruneOptions

    @property
    def goal(self) -> Goal:
        """A share of the parameters, or as many as the budget allows."""
        share = self.options.remove
        whole = self.sizes.whole[self.options.of_all]
        return Goal(self.options.budget, self.options.spent.points, None if share is None else share * whole)

    def candidates(self, kinds: Sequence[Kind]) -> Candidates:
        """Of one sketch."""
        return self._of(self._path(kinds), kinds)

    def in_rounds(
        self, kinds: Sequence[Kind], again: Again, prompts: Sequence[Prompt], tick: Tick, each: Each = in_turn
    ) -> tuple[Candidates, list[SketchRound]]:
        """Of several sketches, and what they brought over one; of one, where no more are asked for."""
        single = self._path(kinds)
        target = within(single, self.goal, self.sizes.parameters)
        if self.options.rounds == 1 or not target:
            return self._of(single, kinds), []

        def without(places: Tensor) -> Sketch:
            return again([self.terms.ids[k] for k in places.tolist()])

        wanted = float(self.sizes.parameters[single.order.places[:target]].sum())
        if self.goal.parameters is not None:  # the set of one round goes beyond that by a part of its last term
            wanted = min(wanted, self.goal.parameters)
        path = path_in_rounds(
            single, without, wanted, self.options.rounds, self.terms, kinds, self.sizes, asked=self._asked
        )
        return self._of(path, kinds), self._compared(single, path, wanted, prompts, tick, each)

    def _compared(
        self, single: Path, path: Path, wanted: float, prompts: Sequence[Prompt], tick: Tick, each: Each
    ) -> list[SketchRound]:
        """The sets at the ends of the rounds, and those of one round that hold as much."""
        parameters = self.sizes.parameters
        whole = reaching(path.order, parameters, wanted)
        ends = [*(stage.removed for stage in path.stages), whole]
        held = [float(parameters[path.order.places[:end]].sum()) for end in ends]
        alone = [reaching(single.order, parameters, one) for one in held]
        sets = [single.order.places[:size] for size in alone] + [path.order.places[:whole]]
        effects = effects_of(self.ablator, prompts, [[self.terms.ids[k] for k in s.tolist()] for s in sets], tick, each)
        found = [statistics.fmean(one.damage for one in under) for under in zip(*effects, strict=True)]
        mine = [*(stage.measured for stage in path.stages), found[-1]]
        return [
            SketchRound(removed=end, measured=here, single_removed=size, single_measured=there)
            for end, here, size, there in zip(ends, mine, alone, found, strict=False)
        ]

    def _path(self, kinds: Sequence[Kind]) -> Path:
        return path_of(self.sketch, self.terms, kinds, self.sizes, asked=self._asked)

    @property
    def _asked(self) -> bool:
        """Whether a set of a size was asked for, whatever is predicted of it."""
        return self.options.remove is not None

    def _of(self, path: Path, kinds: Sequence[Kind]) -> Candidates:
        return candidates(path, self.terms, kinds, self.sizes.parameters, self.goal)

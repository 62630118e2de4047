"""How large a set may be once the rest of the model is repaired, and how that does on held-out prompts.

The sets are those that are tried without repair. The largest whose damage with repair is within the budget, on the
prompts that choose sets, is found by bisection. The held-out test is the one made without repair, with each of its sets
repaired for itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.repair.refit import Refit
from duat_cli.analysis.prune.repair.repairer import Damages, Repaired, Repairer
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.trial import Trial
from duat_cli.analysis.session import prompt_facts
from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import Skipped
from duat_cli.results.prompts import set_of
from duat_cli.results.prune.repair import RepairedSet, SetRepair

NOTHING_REPAIRED = "no layer was refitted"


@dataclass
class Repairs:
    """Nested sets with their repairs, by the names of their orders."""

    nested: dict[str, Nested] = field(default_factory=dict)
    """Nested sets whose chosen set is within the budget with repair, or was asked for; its measured damage is the one
    with repair."""
    trials: dict[str, Trial] = field(default_factory=dict)
    """Trials of the orders that have a chosen set, where prompts are held out."""
    reports: dict[str, SetRepair] = field(default_factory=dict)
    """Reports of the orders that have a chosen set."""
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def repair_sets(
    repairer: Repairer, nested: Mapping[str, Nested], held_out: Sequence[Prompt], options: PruneOptions
) -> Repairs:
    """Repairs the sets of each order, one order after the other."""
    found, refits = Repairs(), list[Refit]()
    for one in nested.values():
        sets = _Sets(repairer, one, options)
        sets.run(held_out, found)
        refits += sets.seen
    if any(refit.short for refit in refits):
        found.warnings.append(
            f"--repair: {repairer.tokens} calibration tokens are fewer than the inputs of some layers: what they do "
            "not determine stays as it is; give more text with --calibration FILE"
        )
    found.skipped += repairer.skipped(refits)
    return found


class _Sets:
    def __init__(self, repairer: Repairer, nested: Nested, options: PruneOptions) -> None:
        self._repairer, self._nested, self._options = repairer, nested, options
        self.seen: list[Refit] = []
        self._on_prompts: dict[int, RepairedSet] = {}

    def run(self, held_out: Sequence[Prompt], found: Repairs) -> None:
        """Chooses a set, repairs and tests it, and adds the results to `found`."""
        name, tested = self._nested.name, list[RepairedSet]()
        found.nested[name] = replace(self._nested, chosen=None)
        chosen = self._largest() if self._options.remove is None else self._wanted()
        if chosen is None:
            return
        place, repaired = chosen
        point = replace(self._nested.curve[place], measured=repaired.after)
        found.nested[name] = replace(self._nested, chosen=point)
        if held_out:
            found.trials[name] = Trial(found.nested[name], len(held_out), self._options)
            tested = self._tested(found.trials[name], held_out, point.removed, repaired)
        found.reports[name] = self._report(repaired, tested)

    def _wanted(self) -> tuple[int, Repaired] | None:
        """Place in the curve of the set that was asked for, with its repair."""
        if self._nested.chosen is None:
            return None
        size = self._nested.chosen.removed
        repaired = self._repaired(size)
        self._on_prompts[size] = self._set(size, repaired, repaired.damages)
        return self._nested.curve.index(self._nested.chosen), repaired

    def _largest(self) -> tuple[int, Repaired] | None:
        """Place of the largest set of the curve within the budget, with its repair. The largest of all is tried
        first."""
        low, high, best = 0, len(self._nested.curve) - 1, None
        middle = high
        while low <= high:
            size = self._nested.curve[middle].removed
            repaired = self._repaired(size, self._options.budget)
            self._on_prompts[size] = self._set(size, repaired, repaired.damages)
            if repaired.after <= self._options.budget:
                best, low = (middle, repaired), middle + 1
            else:
                high = middle - 1
            middle = (low + high) // 2
        return best

    def _repaired(self, size: int, limit: float = math.inf) -> Repaired:
        found = self._repairer.repaired(self._nested.order[:size], limit)
        self.seen.append(replace(found.refit, values={}))  # the report needs no weights
        return found

    def _tested(self, trial: Trial, held_out: Sequence[Prompt], chosen: int, repaired: Repaired) -> list[RepairedSet]:
        """Fills the trial, one set after the other; the sets that were tested."""
        found = []
        for number, size in enumerate(trial.sizes):
            if number not in trial.running:
                continue
            terms = self._nested.order[:size]
            mine = repaired if size == chosen else self._repaired(size)
            what = f"{size} terms ({self._nested.name}) on {len(held_out)} held-out prompts"
            damages = self._repairer.damages(terms, mine, held_out, what)
            for _, after in damages:
                trial.add(number, after)
            found.append(self._set(size, mine, damages))
        return found

    def _set(self, size: int, repaired: Repaired, damages: Damages) -> RepairedSet:
        without = [before for before, _ in damages]
        sides = [without, without if repaired.dropped else [after for _, after in damages]]
        mean = [statistics.fmean(side) for side in sides]
        tenth = [float(torch.tensor(side, dtype=torch.float64).quantile(0.9)) for side in sides]
        over = [sum(value > self._options.budget for value in side) / len(side) for side in sides]
        return RepairedSet(
            removed=size,
            share=size / len(self._nested.order),
            prompts=len(damages),
            mean_before=mean[0],
            mean_after=mean[1],
            percentile_90_before=tenth[0],
            percentile_90_after=tenth[1],
            share_exceeded_before=over[0],
            share_exceeded_after=over[1],
            dropped=repaired.dropped,
        )

    def _report(self, repaired: Repaired, tested: list[RepairedSet]) -> SetRepair:
        refit, prompts = repaired.refit, self._repairer.calibration
        return SetRepair.explained(
            NOTHING_REPAIRED,
            calibration_prompts=len(prompts),
            calibration_tokens=self._repairer.tokens,
            calibration_sha256=set_of(prompt_facts(prompts)).sha256,
            refitted=len(refit.ridges),
            unchanged=refit.unchanged,
            short=refit.short,
            ridge_low=min(refit.ridges.values(), default=None),
            ridge_high=max(refit.ridges.values(), default=None),
            chosen_on=[self._on_prompts[size] for size in sorted(self._on_prompts)],
            held_out=tested,
        )

"""Guarantees for nested sets, from prompts that played no part in choosing them.

Some of the sets are run on the held-out prompts, from the smallest to the chosen one. Two statements are tested: that
few prompts exceed the budget, and that the mean damage is within it. Each is tested in this fixed order up to its first
failure, so that testing more sets costs no confidence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.terms.ablation import Ablations, Ablator, Tick, counted
from duat_cli.loading.model.processes import Each, in_turn
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import LEADING, waiting_bytes
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import Leading
from duat_cli.models.terms.sites import TermId
from duat_cli.statistics.betting import mean_is_below
from duat_cli.statistics.binomial import allowed, choose_nested

CAP = 5.0  # in budgets: a prompt's damage is capped here, as the mean could not be bounded otherwise


class Tried(Protocol):
    """Sets that are run on held-out prompts."""

    @property
    def sets(self) -> list[list[TermId]]: ...

    @property
    def running(self) -> list[int]:
        """Numbers of the sets that are still run."""
        ...

    def add(self, number: int, damage: float) -> None:
        """Adds the damage of a running set on one more prompt."""
        ...


class Trial:
    """Nested sets up to the chosen one, on held-out prompts.

    Sets larger than one for which both statements have failed are not run any more. Only the chosen set always is, on
    every prompt, to show its damage on prompts that did not choose it.
    """

    def __init__(self, nested: Nested, prompts: int, options: PruneOptions) -> None:
        """options: the statements to be shown, fixed before a held-out prompt is run."""
        assert nested.chosen is not None
        self._order, self.prompts, self.options = nested.order, prompts, options
        self.most = CAP * options.budget
        """Cap on a prompt's damage in the mean."""
        may, tested = nested.sizes(nested.chosen.removed), options.spent.tested
        self.sizes = sorted({may[max(1, round(len(may) * k / tested)) - 1] for k in range(1, tested + 1)})
        self.may_exceed = allowed(prompts, options.exceed, options.confidence)
        """How many prompts may exceed the budget for a set to pass; None: there are too few prompts for any."""
        self.damages: list[list[float]] = [[] for _ in self.sizes]
        """Damages of each set on the prompts that it was run on; see `add`."""
        self.exceeded = [0 for _ in self.sizes]
        """How many of these prompts are above the budget, for each set."""
        self._capped = [0.0 for _ in self.sizes]  # sums of the capped damages

    @property
    def sets(self) -> list[list[TermId]]:
        return [self._order[:size] for size in self.sizes]

    @property
    def running(self) -> list[int]:
        """Numbers of the sets that are still run."""
        alive = max(self._failed(self._exceeds), self._failed(self._too_much)) + 1
        return sorted({*range(min(alive, len(self.sizes))), len(self.sizes) - 1})

    def add(self, number: int, damage: float) -> None:
        """Adds the damage of a running set on one more prompt."""
        self.damages[number].append(damage)
        self.exceeded[number] += damage > self.options.budget
        self._capped[number] += min(damage, self.most)

    def limit(self, number: int) -> float | None:
        """The damage that at most the given share of prompts exceed, by this set alone; None if some were not run.

        As many of the damages lie above it as prompts may exceed the budget.
        """
        damages = self.damages[number]
        return sorted(damages)[-1 - (self.may_exceed or 0)] if len(damages) == self.prompts else None

    def choice(self) -> int | None:
        """Number of the largest set for which few prompts are shown to exceed the budget, once all are counted."""
        seen = self.exceeded[: self._failed(self._exceeds) + 1]
        return choose_nested(seen, self.prompts, self.options.exceed, self.options.confidence)

    def mean_choice(self) -> int | None:
        """Number of the largest set whose mean damage is shown to be within the budget, once all are counted."""
        passed = 0
        while passed < len(self.sizes) and self._mean_shown(self.damages[passed]):
            passed += 1
        return passed - 1 if passed else None

    def capped(self, number: int) -> int:
        """How many prompts had their damage capped in the mean."""
        return sum(value > self.most for value in self.damages[number])

    def _failed(self, test: Callable[[int], bool]) -> int:
        """Number of the first set for which a statement has failed; the number of sets if there is none."""
        return next((k for k in range(len(self.sizes)) if test(k)), len(self.sizes))

    def _exceeds(self, number: int) -> bool:
        return self.exceeded[number] > (self.may_exceed or 0)

    def _too_much(self, number: int) -> bool:
        """Whether the mean would be above the budget even if the prompts still to come had no damage."""
        return self._capped[number] > self.options.budget * self.prompts

    def _mean_shown(self, damages: Sequence[float]) -> bool:
        budget, confidence = self.options.budget, self.options.confidence
        return len(damages) == self.prompts and mean_is_below(damages, budget, self.most, confidence)


def trials_of(every: Mapping[str, Nested], prompts: int, options: PruneOptions) -> dict[str, Trial]:
    """The trials of the orders with a chosen set, by name; none without held-out prompts."""
    return {name: Trial(one, prompts, options) for name, one in every.items() if one.chosen is not None and prompts}


def try_alone(
    ablator: Ablator, trials: Sequence[Tried], held_out: Sequence[Prompt], tick: Tick, each: Each = in_turn
) -> None:
    """Runs the trials of several orders one prompt after the other, all sets of a prompt in one go.

    A set that fails on a prompt may still be run on prompts under way beside it, where it is not counted.
    """
    removals = [[ablator.removals(terms) for terms in trial.sets] for trial in trials]

    def under(item: tuple[int, list[tuple[int, int]]]) -> dict[tuple[int, int], float]:
        p, wanted = item
        given = ablator.place(held_out[p])
        done = counted(tick, p * len(wanted), len(wanted) * len(held_out))
        effects = ablator.effects(ablator.record(given), given, [removals[place][k] for place, k in wanted], done)
        return {one: effect.damage for one, effect in zip(wanted, effects, strict=True)}

    running = (
        (p, [(place, k) for place, trial in enumerate(trials) for k in trial.running]) for p in range(len(held_out))
    )
    for found in each(under, running if trials else ()):
        for place, trial in enumerate(trials):
            for k in trial.running:
                trial.add(k, found[place, k])


def try_together(
    ablator: Ablator, trials: Sequence[Tried], held_out: Sequence[Prompt], run: Callable[[Sequence[Pass]], None]
) -> None:
    """Runs several trials on as many prompts at a time as fit. run: runs passes side by side.

    A prompt's own pass goes one block ahead of the passes that remove something. A set that fails on a prompt is still
    run on the prompts beside it, and not counted there.
    """
    removals = [[ablator.removals(terms) for terms in trial.sets] for trial in trials]
    left = list(held_out)
    while left and trials:
        wanted = [(place, k) for place, trial in enumerate(trials) for k in trial.running]
        passes, found, size = list[Pass](), list[Ablations](), 0
        for prompt in left:
            given = ablator.place(prompt)
            own = Leading(ablator.structure, ablator.metric.forward(given), prompt.input_ids.shape[1])
            gone = [removals[place][k] for place, k in wanted]
            done = counted(functools.partial(_at_end, own.forget), 0, len(gone))
            one = ablator.ablations(own, given, gone, done)
            held = one.size + LEADING * waiting_bytes(own.tokens, ablator.structure.hidden_size)
            if found and size + held > ablator.waiting:
                break
            found.append(one)
            passes += [own, *one.passes]
            size += held
        run(passes)
        if not ablator.settled(found):
            continue
        left = left[len(found) :]
        for one in found:
            for place, trial in enumerate(trials):
                for k in trial.running:
                    trial.add(k, one.damage(wanted.index((place, k))))


def _at_end(last: Callable[[], None], done: int, every: int) -> None:
    if done == every:
        last()

"""Real ablation: terms taken out of the model's own forward pass, and the damage that does."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duat_cli.analysis.plan.waves import waves
from duat_cli.analysis.prune.terms.damage import Metric
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.processes import Each, in_turn
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.budgets import ABLATION_BYTES, waiting_bytes
from duat_cli.models.sweep.lockstep import Weights, one_by_one
from duat_cli.models.sweep.passes import (
    BlockCall,
    BlockPass,
    Calls,
    Leading,
    Means,
    Recorded,
    Removals,
    record,
    removals,
    run_alone,
    run_without,
    without,
)
from duat_cli.models.sweep.rows import NotInRowsError, in_waves, without_each
from duat_cli.models.terms.sites import BlockSites, Site, TermId

Tick = Callable[[int, int], None]  # passes done, passes in all


class Effect(NamedTuple):
    """What a removal does to one prompt."""

    damage: float
    moved: float
    """|change of the last block's output| / |that output|."""


class Ablation:
    """One set of terms taken out of one prompt's pass: itself a pass."""

    def __init__(
        self, one: BlockPass, judge: Callable[[Tensor], float], done: Callable[[], None], *, start: int, size: int
    ) -> None:
        """start: its first block. size: bytes that it holds, about, while it waits for the next block."""
        self.start, self.size = start, size
        self._pass: BlockPass | None = one
        self._judge, self._done = judge, done
        self._moved: float | None = None
        self._found: float | UnsupportedModelError | None = None

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What `run` needs around it."""
        assert self._pass is not None
        return self._pass.active()

    def run(self) -> None:
        assert self._pass is not None
        self._pass.run()
        try:
            self._found = self._judge(self._pass.output)
        except UnsupportedModelError as fault:  # of a set that may turn out not to be asked for
            self._found = fault
        self._pass = None  # the output with it
        self._done()

    def passed(self, moved: float) -> None:
        """The last block: how far its output is from what it was."""
        self._moved = moved

    @property
    def effect(self) -> Effect:
        """Once it has run. UnsupportedModelError as of `damage`."""
        return Effect(self.damage, self.moved)

    @property
    def moved(self) -> float:
        """As of `Effect`, once it has run."""
        assert self._moved is not None
        return self._moved

    @property
    def damage(self) -> float:
        """Once it has run. UnsupportedModelError where the output was not finite."""
        if isinstance(self._found, UnsupportedModelError):
            raise self._found
        assert self._found is not None
        return self._found


class Ablator:
    """Ablates sets of terms of one model under one metric."""

    def __init__(
        self,
        structure: ModelStructure,
        sites: Mapping[nn.Module, BlockSites],
        metric: Metric,
        means: Means | None = None,
        device: str | None = None,
    ) -> None:
        """device: where the prompts go; None is where the weights are."""
        self.structure, self.sites, self.metric, self.means = structure, sites, metric, means
        self._device = structure.stack.device if device is None else device
        self._in_rows: bool | None = None  # whether the model's rows of a batch keep apart; None: not tried yet

    def place(self, prompt: Prompt) -> Tensor:
        """A prompt's token ids where the model is."""
        return prompt.input_ids.to(self._device)

    def record(self, ids: Tensor) -> Recorded:
        """The unablated pass of a prompt."""
        return record(self.structure, self.metric.forward(ids))

    def ablation(
        self,
        calls: Calls,
        reference: Recorded | Leading,
        ids: Tensor,
        removals: Removals,
        done: Callable[[], None] = lambda: None,
        weights: Weights | None = None,
    ) -> Ablation:
        """The pass that removes all these terms together.

        calls: of the unablated pass. reference: what its output is taken from, at the end. done: called then. weights:
        as of `BlockPass`.
        """

        def judge(output: Tensor) -> float:
            return _finite(self.metric.measured(reference.output, output, ids), removals, output)

        def last(output: Tensor) -> None:
            before = calls[len(self.structure.calls) - 1].after
            found.passed(relative_error(output.double(), before.double()))

        one = without(self.structure, self.metric.forward(ids), calls, removals, weights, last)
        size = waiting_bytes(ids.shape[1], self.structure.hidden_size)
        found = Ablation(one, judge, done, start=min(removals, default=0), size=size)
        return found

    def damage(self, recorded: Recorded, ids: Tensor, removals: Removals) -> float:
        """What removing all these terms together does to one prompt."""
        return self._alone(recorded, ids, removals).damage

    def damages(
        self, recorded: Recorded, ids: Tensor, gone: Sequence[Removals], done: Callable[[], None] = lambda: None
    ) -> list[float]:
        """The damages among `effects`."""
        return [effect.damage for effect in self.effects(recorded, ids, gone, done)]

    def effects(
        self, recorded: Recorded, ids: Tensor, gone: Sequence[Removals], done: Callable[[], None] = lambda: None
    ) -> list[Effect]:
        """What removing each of these does to one prompt, as many side by side as pays. done: called after each."""
        found: dict[int, Effect] = {}
        for wave in in_waves(gone, ids.shape[1], recorded.output.numel()):
            some = [gone[k] for k in wave]
            effects = self._side_by_side(recorded, ids, some) if len(some) > 1 and self._in_rows is not False else None
            for place, k in enumerate(wave):
                found[k] = self._alone(recorded, ids, gone[k]) if effects is None else effects[place]
                done()
        return [found[k] for k in range(len(gone))]

    def _alone(self, recorded: Recorded, ids: Tensor, removals: Removals) -> Effect:
        found = self.ablation(recorded.calls, recorded, ids, removals)
        one_by_one([found])
        return found.effect

    def _side_by_side(self, recorded: Recorded, ids: Tensor, gone: Sequence[Removals]) -> list[Effect] | None:
        """The effect of each; None where this model must take them one after the other.

        The first time the last of them is also run alone: a model whose rows see each other, such as one whose experts
        take a limited number of tokens, is found out.
        """
        forward = self.metric.forward(ids.expand(len(gone), *ids.shape[1:]).contiguous())
        moved: list[float] = []

        def last(hidden: Tensor) -> None:
            before = recorded.calls[-1].after.double()
            moved.extend(relative_error(row[None].double(), before) for row in hidden)

        try:
            outputs = run_alone(without_each(self.structure, forward, recorded.calls, gone, last))
        except NotInRowsError:
            self._in_rows = False
            return None
        if self._in_rows is None:
            alone = run_without(self.structure, self.metric.forward(ids), recorded, gone[-1])
            fits = outputs.shape[1:] == alone.shape[1:]
            self._in_rows = fits and not relative_error(outputs[-1:], alone) > tolerance_for(alone.dtype)
        if not self._in_rows:
            return None
        damages = self.metric.measured_each(recorded.output, outputs, ids)
        finite = [_finite(each, one, outputs) for each, one in zip(damages, gone, strict=True)]
        return [Effect(*both) for both in zip(finite, moved, strict=True)]

    def removals(self, terms: Iterable[TermId]) -> Removals:
        """What to take out of which block call: the same for every prompt."""
        return removals(self.structure, self.sites, terms, self.means)


def measured(
    ablator: Ablator, prompts: Sequence[Prompt], sets: Sequence[Sequence[TermId]], tick: Tick, each: Each = in_turn
) -> Tensor:
    """The damage of every set under every prompt, (sets, prompts) float64. One prompt's passes are kept at a time."""
    removed = [ablator.removals(terms) for terms in sets]
    every = len(sets) * len(prompts)

    def under(p: int) -> list[float]:
        ids = ablator.place(prompts[p])
        return ablator.damages(ablator.record(ids), ids, removed, counted(tick, p * len(sets), every))

    return torch.tensor(list(each(under, range(len(prompts)))), dtype=torch.float64).reshape(len(prompts), len(sets)).T


def ablation_waves(ablations: Sequence[Ablation]) -> list[list[Ablation]]:
    """As many side by side as fit, in the order of the blocks at which they begin; one empty wave for none."""
    ordered = sorted(ablations, key=lambda one: one.start)
    return [[ordered[k] for k in wave] for wave in waves([one.size for one in ordered], ABLATION_BYTES)]


def counted(tick: Tick, done: int, every: int) -> Callable[[], None]:
    """To be called after each of the passes that follow those that are done."""
    numbers = itertools.count(done + 1)
    return lambda: tick(next(numbers), every)


def _finite(damage: float, gone: Removals, output: Tensor) -> float:
    """The damage; UnsupportedModelError where it is no number, for then a comparison with a budget would be false, and
    the set pass for harmless."""
    if not math.isfinite(damage):
        blocks = ", ".join(map(str, sorted(gone)[:3])) + (" and others" if len(gone) > 3 else "")
        raise UnsupportedModelError(
            f"with terms of block {blocks} removed, the model's output is not finite in "
            f"{str(output.dtype).removeprefix('torch.')}; a wider --dtype may help"
        )
    return damage


class MeanSums:
    """The mean over all tokens of what every site holds, and of what every block adds."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, Site | None], Tensor] = {}
        self._rows: dict[tuple[int, Site | None], int] = defaultdict(int)  # a module may run twice in a block

    def see(self, number: int, site: Site, value: Tensor) -> None:
        """To be shown every site of every pass."""
        if site.kind != "expert":
            self._add(number, site, value)

    def add(self, calls: Sequence[BlockCall]) -> None:
        """The block calls of one pass."""
        for number, call in enumerate(calls):
            self._add(number, None, call.after - call.before)

    def _add(self, number: int, site: Site | None, value: Tensor) -> None:
        total = value.reshape(-1, value.shape[-1]).double().sum(dim=0)
        self._sums[number, site] = self._sums.get((number, site), torch.zeros_like(total)) + total
        self._rows[number, site] += value.numel() // value.shape[-1]

    def means(self) -> Means:
        """(width,) each."""
        return {key: total / self._rows[key] for key, total in self._sums.items()}


def mean_values(
    structure: ModelStructure, sites: Mapping[nn.Module, BlockSites], metric: Metric, inputs: Sequence[Tensor]
) -> Means:
    """The means over these prompts, run one after the other."""
    found = MeanSums()
    for ids in inputs:
        found.add(record(structure, metric.forward(ids.to(structure.stack.device)), sites, found.see).calls)
    return found.means()

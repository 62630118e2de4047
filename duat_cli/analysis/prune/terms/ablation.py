"""Real ablation: terms are removed from the model's own forward pass, and the damage is measured."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from duat_cli.analysis.plan.waves import waves
from duat_cli.analysis.prune.terms.damage import Metric
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.loading.model.processes import Each, in_turn
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.budgets import ABLATION_BYTES, waiting_bytes
from duat_cli.models.discovery.modality import Given, in_rows, placed
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.lockstep import Pass, Weights, one_by_one
from duat_cli.models.sweep.passes import BlockCall, BlockPass, Leading, Means, Recorded, Removals, record, removals
from duat_cli.models.sweep.rows import NotInRowsError, in_waves, without_each
from duat_cli.models.terms.sites import Site, Sites, TermId

Tick = Callable[[int, int], None]  # passes done, passes in all
Judged: TypeAlias = float | UnsupportedModelError
"""A damage, or the error that says why there is none."""


class Effect(NamedTuple):
    """The effect of a removal on one prompt."""

    damage: float
    moved: float
    """|change of the last block's output| / |that output|."""


@dataclass
class _Rows:
    """Whether rows of a batch do not influence each other in a model."""

    apart: bool | None = None
    """None: not known yet."""
    checked: bool = False
    """Whether a pass has been made that finds out."""


class AblationPass:
    """A pass of a prompt with a set of terms removed; or with several sets, each removed in a row of its own."""

    def __init__(
        self,
        ablator: Ablator,
        reference: Recorded | Leading,
        given: Given,
        gone: Sequence[Removals],
        places: Sequence[int],
        weights: Weights | None,
        done: Callable[[], None] = lambda: None,
        like: AblationPass | None = None,
    ) -> None:
        """reference, weights, done: as for `Ablator.ablations`. places: numbers of the sets. like: another pass, whose
        last row removes the one set of this pass; this pass then only checks that row and has no results."""
        self._metric, self._rows, self._reference, self._given = ablator.metric, ablator.rows, reference, given
        self._gone, self.places, self._done, self._like = gone, places, done, like
        self._calls = len(ablator.structure.calls)
        self.start = min(min(removals, default=0) for removals in gone)
        """The first block from which something is removed, where the pass begins."""
        self.size = len(gone) * waiting_bytes(reference.tokens, ablator.structure.hidden_size)
        """Bytes that the pass holds while it waits for the next block, approximately."""
        self.moved: list[float] = []  # of every row: how far the last block's output moved
        self.judged: list[Judged] = []  # of every set, once the pass has run; empty where rows influence each other
        self.checked = False  # whether another pass checks the last row
        self.last: Tensor | None = None  # output of the last row, if it is checked
        forward = self._metric.forward(in_rows(given, len(gone)))
        made = without_each(ablator.structure, forward, reference.calls, gone, weights, self._ended)
        self._pass: BlockPass | None = made

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What `run` needs around it."""
        return needed(self._pass).active()

    def run(self) -> None:
        assert self._pass is not None
        if not self._void:
            try:
                self._pass.run()
                self._judge(self._pass.output)
            except NotInRowsError:
                self._rows.apart = False
            # A classifier of the last token takes no batch if its config has no padding token, and code that reads
            # pictures may take only one.
            except (ValueError, RuntimeError):
                if len(self._gone) == 1:
                    raise
                self._rows.apart = False
        self._pass = None  # frees the output
        if not self._void:
            for _ in self.judged:
                self._done()

    @property
    def _void(self) -> bool:
        """Whether the pass has no results, because its rows influence each other."""
        return self._rows.apart is False and len(self.places) > 1

    def _ended(self, hidden: Tensor) -> None:
        """Takes the last block's output, and notes how far each row moved."""
        before = self._reference.calls[self._calls - 1].after.double()
        self.moved.extend(relative_error(row.double(), before) for row in hidden.split(1))

    def _judge(self, output: Tensor) -> None:
        """Notes the damage of every row; or, in a pass that checks another, whether the same removal gives the same
        output there."""
        if self._like is not None:
            row, close = self._like.last, tolerance_for(output.dtype)
            alike = row is not None and row.shape == output.shape and not relative_error(row, output) > close
            self._rows.apart = self._rows.apart is not False and alike
            return
        self.last = output[-1:].clone() if self.checked else None
        if len(self._gone) == 1:
            damages = [self._metric.measured(self._reference.output, output, self._given)]
        else:
            damages = self._metric.measured_each(self._reference.output, output, self._given)
        self.judged = [_finite(*one, output.dtype) for one in zip(damages, self._gone, strict=True)]


class Ablations:
    """Sets of terms, each removed from a pass of one prompt. Results are there once `passes` have run."""

    def __init__(self, passes: Sequence[AblationPass]) -> None:
        self.passes = passes

    @property
    def size(self) -> int:
        """Bytes of all passes while they wait, approximately."""
        return sum(one.size for one in self.passes)

    @property
    def in_rows(self) -> bool:
        """Whether some sets are rows of one pass."""
        return any(len(one.places) > 1 for one in self.passes)

    @functools.cached_property
    def _found(self) -> dict[int, tuple[Judged, float]]:
        found = dict[int, tuple[Judged, float]]()
        for one in self.passes:
            if one.places:
                found.update(zip(one.places, zip(one.judged, one.moved, strict=True), strict=True))
        return found

    def damage(self, number: int) -> float:
        """Damage of removing one set. Raises UnsupportedModelError where the output was not finite."""
        damage, _ = self._found[number]
        if isinstance(damage, UnsupportedModelError):  # raised only here, as this set may never be asked for
            raise damage
        return damage

    @property
    def effects(self) -> list[Effect]:
        """Effect of every set. Raises UnsupportedModelError as `damage` does."""
        return [Effect(self.damage(k), self._found[k][1]) for k in range(len(self._found))]


class Ablator:
    """Ablates sets of terms of one model under one metric."""

    def __init__(
        self,
        structure: ModelStructure,
        sites: Sites,
        metric: Metric,
        means: Means | None = None,
        device: str | None = None,
        waiting: int | None = None,
    ) -> None:
        """device: where the prompts go; None: where the weights are. waiting: most bytes of passes that wait for the
        next block at the same time."""
        self.structure, self.sites, self.metric, self.means = structure, sites, metric, means
        self._device = structure.stack.device if device is None else device
        self.waiting = ABLATION_BYTES if waiting is None else waiting
        self.rows = _Rows()
        self._width = 0  # width of the output, once a prompt is recorded

    def place(self, prompt: Prompt) -> Given:
        """The model inputs of a prompt, on the model's device."""
        return placed(prompt.given, self._device, self.structure.stack.dtype)

    def record(self, given: Given) -> Recorded:
        """The unablated pass of a prompt."""
        return record(self.structure, self.metric.forward(given))

    def ablations(
        self,
        reference: Recorded | Leading,
        given: Given,
        gone: Sequence[Removals],
        done: Callable[[], None] = lambda: None,
        weights: Weights | None = None,
    ) -> Ablations:
        """The passes that remove each of these, with as many in the rows of one pass as pays off. Ask `settled` whether
        their results count.

        reference: the pass that outputs are compared with. done: called behind each. weights: as for `BlockPass`.

        The first pass in rows whose prompt is recorded has its last row also run alone, to detect a model whose rows
        influence each other, such as one whose experts take a limited number of tokens.
        """
        tokens, passes, rows = reference.tokens, list[AblationPass](), self.rows
        if isinstance(reference, Recorded):
            self._width = reference.output.numel() // tokens
        if not isinstance(given, Tensor) and any(len(one) != 1 for one in given.values()):
            rows.apart = False  # no batch axis, such as patches of a picture, (N, width)
        alone = rows.apart is False or (rows.apart is None and not isinstance(reference, Recorded))
        for wave in [[k] for k in range(len(gone))] if alone else in_waves(gone, tokens, self._width * tokens):
            some = [gone[k] for k in wave]
            one = AblationPass(self, reference, given, some, wave, weights, done)
            passes.append(one)
            if len(wave) > 1 and not rows.checked:
                rows.checked = one.checked = True
                passes.append(AblationPass(self, reference, given, some[-1:], (), weights, like=one))
        return Ablations(passes)

    def settled(self, found: Sequence[Ablations]) -> bool:
        """Whether the results of these, once run, count. If not, rows of this model influence each other; asked for
        again, the sets run one by one."""
        return self.rows.apart is not False or not any(one.in_rows for one in found)

    def ablate(
        self,
        made: Callable[[], list[Ablations]],
        first: Callable[[Sequence[Pass]], None],
        others: Callable[[Sequence[Pass]], None],
    ) -> list[Ablations]:
        """Runs the ablations that `made` returns in waves that fit, where weights are read block by block; if they are
        not settled, makes and runs them again.

        first, others: run the passes of the first wave, and of every other.
        """
        found = made()
        wave, *more = _waves(found, self.waiting)
        first(wave)
        for wave in more:
            others(wave)
        return found if self.settled(found) else self.ablate(made, others, others)

    def damage(self, recorded: Recorded, given: Given, removals: Removals) -> float:
        """Damage of removing all these terms together, under one prompt."""
        return self.effects(recorded, given, [removals])[0].damage

    def effects(
        self, recorded: Recorded, given: Given, gone: Sequence[Removals], done: Callable[[], None] = lambda: None
    ) -> list[Effect]:
        """Effect of each removal under one prompt, where all weights are in memory. done: is called after each."""
        found = self.ablations(recorded, given, gone, done)
        one_by_one(found.passes)
        return found.effects if self.settled([found]) else self.effects(recorded, given, gone, done)

    def removals(self, terms: Iterable[TermId]) -> Removals:
        """The removals by block call that take out these terms. They do not depend on the prompt."""
        return removals(self.structure, self.sites, terms, self.means)


def effects_of(
    ablator: Ablator, prompts: Sequence[Prompt], sets: Sequence[Sequence[TermId]], tick: Tick, each: Each = in_turn
) -> list[list[Effect]]:
    """Effects by prompt and set: a list per prompt, an effect per set. Only one prompt's passes are kept at a time."""
    removed = [ablator.removals(terms) for terms in sets]
    every = len(sets) * len(prompts)

    def under(p: int) -> list[Effect]:
        given = ablator.place(prompts[p])
        return ablator.effects(ablator.record(given), given, removed, counted(tick, p * len(sets), every))

    return list(each(under, range(len(prompts))))


def _waves(found: Sequence[Ablations], waiting: int) -> list[list[AblationPass]]:
    """The passes in waves of as many side by side as fit, in the order of the blocks at which they begin; without
    passes one empty wave. waiting: bytes of a wave."""
    ordered = sorted((each for one in found for each in one.passes), key=lambda one: one.start)
    return [[ordered[k] for k in wave] for wave in waves([one.size for one in ordered], waiting)]


def counted(tick: Tick, done: int, every: int) -> Callable[[], None]:
    """A function to be called after each further pass. done: passes that are done already; every: passes in all."""
    numbers = itertools.count(done + 1)
    return lambda: tick(next(numbers), every)


def _finite(damage: float, gone: Removals, dtype: torch.dtype) -> Judged:
    """The damage, or an error where it is not finite: comparing NaN with a budget is false, so that the set would pass
    for harmless."""
    if math.isfinite(damage):
        return damage
    blocks = ", ".join(map(str, sorted(gone)[:3])) + (" and others" if len(gone) > 3 else "")
    return UnsupportedModelError(
        f"with terms of block {blocks} removed, the model's output is not finite in "
        f"{str(dtype).removeprefix('torch.')}; a wider --dtype may help"
    )


class MeanSums:
    """Means over all tokens of what every site holds and of what every block adds, gathered pass by pass."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, Site | None], Tensor] = {}
        self._rows: dict[tuple[int, Site | None], int] = defaultdict(int)  # a module may run twice in a block

    def see(self, number: int, site: Site, value: Tensor) -> None:
        """Adds the value of a site; to be called for every site of every pass."""
        if site.kind != "expert":
            self._add(number, site, value)

    def add(self, calls: Sequence[BlockCall]) -> None:
        """Adds the block calls of one pass."""
        for number, call in enumerate(calls):
            self._add(number, None, call.after - call.before)

    def _add(self, number: int, site: Site | None, value: Tensor) -> None:
        first = site is not None and _channels_first(site.module, value)
        width = value.shape[1 if first else -1]
        rows = value.movedim(1, -1) if first else value
        total = rows.reshape(-1, width).double().sum(dim=0)
        total = total.reshape(width, *[1] * (value.ndim - 2)) if first else total
        self._sums[number, site] = self._sums.get((number, site), torch.zeros_like(total)) + total
        self._rows[number, site] += value.numel() // width

    def means(self) -> Means:
        """The means, (width,) each or (width, 1, 1) for convolutions, so that they broadcast against the values."""
        return {key: total / self._rows[key] for key, total in self._sums.items()}


def _channels_first(module: nn.Module, value: Tensor) -> bool:
    """Whether a module returns (1, width, 1, tokens), as one made of convolutions does."""
    if value.ndim != 4:
        return False
    last = next((one for one in reversed(list(module.modules())) if isinstance(one, nn.Conv2d)), None)
    return last is not None and value.shape[1] == last.out_channels


def mean_values(structure: ModelStructure, sites: Sites, metric: Metric, inputs: Sequence[Given]) -> Means:
    """The means over these prompts, run one after the other."""
    found, stack = MeanSums(), structure.stack
    for given in inputs:
        forward = metric.forward(placed(given, stack.device, stack.dtype))
        found.add(record(structure, forward, sites, found.see).calls)
    return found.means()

"""What is planned: a command, its prompts, and those of its options that decide how much it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duat_cli.errors import InputError, needed
from duat_cli.kinds import KINDS, WHOLE, Effort, Kind, MetricName, apart
from duat_cli.models.budgets import ABLATION_BYTES
from duat_cli.statistics.binomial import prompts_needed

if TYPE_CHECKING:
    from duat_cli.loading.checkpoint.headers import TensorEntry
    from duat_cli.loading.checkpoint.preflight import CheckpointFiles
    from duat_cli.results.plan import Planned


@dataclass(frozen=True)
class Spent:
    """How much `duat prune-bound` computes where nothing else is said."""

    probes: int = 32
    measure: int = 16
    points: int = 8
    """Sets of each order that are measured on the prompts, about."""
    tested: int = 5
    """Sets of each order that are tested on held-out prompts."""
    certified: bool = True
    """Whether certified bounds are computed."""
    printed: int | None = 4
    """Prompts on which Eq. 16 is computed; None: all."""
    tokens: int | None = 768
    """Of all prompts that choose sets together, about, by cutting the longest; held-out prompts are whole."""
    shortest: int = 48
    """Tokens that no prompt is cut below for that."""
    few_held_out: bool = False
    """Whether no more prompts are held out than it takes to let one of them exceed the budget."""


NO_HOLDOUT = "no held-out prompts: give --holdout 0.5, a share of the prompts, or --holdout FILE of other texts"
RANDOM_SETS = 5  # beside one of duat's
BESIDES = 2  # sets of each order, that others stand beside: see `besides`
CRITERIA, BLOCK_CRITERIA = 4, 3  # that choose sets of a kind, and of whole blocks

EFFORTS: dict[Effort, Spent] = {
    "quick": Spent(
        probes=8, measure=4, points=3, tested=3, certified=False, printed=2, tokens=384, shortest=24, few_held_out=True
    ),
    "default": Spent(),
    "thorough": Spent(probes=128, measure=200, points=20, tested=16, printed=None, tokens=None),
}


@dataclass(frozen=True)
class PruneOptions:
    """What `duat prune-bound` computes."""

    kinds: tuple[Kind, ...] = KINDS
    metric: MetricName | None = None
    probes: int = 32
    measure: int = 16
    budget: float = 0.1
    confidence: float = 0.95
    exceed: float = 0.1
    ablate_mean: bool = False
    uniform: bool = False
    """Whether every FFN is to lose as many neurons, and every attention as many key and value heads with theirs."""
    repair: bool = False
    """Whether what is left of the model is refitted."""
    joint: bool = False
    """Whether terms of all kinds go into one set."""
    remove: float | None = None
    """Share of the parameters that a set is to hold, in place of the budget that it is to keep to."""
    of_all: bool = False
    """Whether that is of all parameters, not of the blocks' alone."""
    criteria: bool = False
    """Whether sets that other criteria choose, and random ones, are run on the held-out prompts."""
    rounds: int = 1
    """How often the model is sketched, each time without what the rounds before took."""
    effort: Effort = "default"
    """What probes and measure were taken from where they were not given; and the rest of what is spent."""

    named: int | None = None
    """Terms of the set that is to be written, where a number of them is asked for."""

    whole: bool = False
    """Whether no prompt is cut, for which `--out` keeps what each gave by itself."""

    def groups(self, kinds: Sequence[Kind]) -> list[tuple[Kind, ...]]:
        """Of which of these kinds, those that the model has, sets are made: of each, or of all of them together."""
        return [tuple(kinds)] if self.joint else [(kind,) for kind in kinds]

    def require_held_out(self, prompts: int) -> None:
        """InputError for so few held-out prompts that no set could be guaranteed on them; without any, none is asked
        for."""
        needed = prompts_needed(self.exceed, self.confidence)
        if 0 < prompts < needed:
            raise InputError(
                f"--holdout: {prompts} prompts cannot show with {100 * self.confidence:g} % confidence that at most "
                f"{100 * self.exceed:g} % exceed the budget; at least {needed} are needed, or a larger --exceed"
            )
        if self.criteria and not prompts:
            raise InputError(f"--criteria: sets are compared on held-out prompts; {NO_HOLDOUT}")

    @property
    def spent(self) -> Spent:
        """What the effort says."""
        return replace(EFFORTS[self.effort], tokens=None) if self.whole else EFFORTS[self.effort]

    def __post_init__(self) -> None:
        if not math.isfinite(self.budget) or self.budget <= 0:
            raise InputError(f"--budget {self.budget:g}: expected a number above 0, in the metric's unit")
        for name, value, usual in (("--confidence", self.confidence, 0.95), ("--exceed", self.exceed, 0.1)):
            if not 0 < value < 1:
                raise InputError(f"{name} {value:g}: expected a number between 0 and 1, such as {usual}")
        if self.repair and self.ablate_mean:
            raise InputError("--repair: fits what is left once terms are zero, not at their mean; use --ablate zero")
        if self.criteria and self.repair:
            raise InputError(
                "--criteria: compares sets as they are, and with --repair duat's would be refitted; leave one of them "
                "out"
            )
        if self.uniform and not {"neuron", "head"} & set(self.kinds):
            raise InputError("--uniform: is about neurons and heads; add one of them to --granularity")
        if self.uniform and self.joint and not set(self.kinds) <= {"neuron", "head"}:
            raise InputError("--uniform: one set of neurons and heads; leave other kinds out of --granularity")
        if self.remove is not None and not 0 < self.remove < 1:
            raise InputError(f"--remove {100 * self.remove:g}%: expected more than 0 and less than 100 %")
        if self.joint and not apart(self.kinds):
            raise InputError("one set of several kinds: none of them may be a part of another")


def ablated(kind: Kind, count: int, measure: int) -> int:
    """How many of so many terms of a kind are ablated for real.

    Of whole parts, which are few and which the linear prediction says least of, all up to four times as many.
    """
    return min(count, 4 * measure if kind in WHOLE else measure)


def orders(counts: Mapping[Kind, int], options: PruneOptions) -> tuple[list[tuple[Kind, ...]], list[tuple[Kind, ...]]]:
    """Of which kinds orders are, in which terms leave: those chosen by what is predicted of them, and those by what
    each does alone, which is known later. counts: terms of each kind."""
    there = [kind for kind, count in counts.items() if count]
    found: tuple[list[tuple[Kind, ...]], list[tuple[Kind, ...]]] = [], []
    for kinds in options.groups(there) if there else []:
        found[by_measure({kind: counts[kind] for kind in kinds}, options.measure)].append(kinds)
    return found


def by_measure(counts: Mapping[Kind, int], measure: int) -> bool:
    """Whether sets of kinds of so many terms are chosen by what each term does alone: whole parts, all ablated."""
    return set(counts) <= WHOLE and all(count == ablated(kind, count, measure) for kind, count in counts.items())


def besides(sizes: Sequence[int]) -> list[int]:
    """Of sizes of tested sets, from the smallest: those that sets of other criteria stand beside."""
    return sorted({sizes[len(sizes) // 2], sizes[-1]})


def rivals(counts: Mapping[Kind, int], options: PruneOptions) -> int:
    """Sets that other criteria choose, with duat's own and random ones, at most. counts: terms of each kind."""
    if not options.criteria:
        return 0
    found = 0
    for kinds in (kinds for some in orders(counts, options) for kinds in some):
        scores = BLOCK_CRITERIA if kinds == ("block",) else CRITERIA
        once = options.uniform or set(kinds) & WHOLE
        found += BESIDES * (1 + RANDOM_SETS + scores * (1 if once else 2))
    return found


def longest(tokens: Sequence[int], spent: Spent) -> int | None:
    """To how many tokens prompts of so many are cut where sets are chosen; None: they are left whole."""
    if spent.tokens is None or sum(tokens) <= spent.tokens or max(tokens) <= spent.shortest:
        return None
    low, high = spent.shortest, max(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(min(n, middle) for n in tokens) <= spent.tokens else (low, middle)
    return low


def effort_of(effort: Effort, probes: int | None, measure: int | None) -> tuple[int, int]:
    """Probes and terms to measure: those given, else those of the effort."""
    spent = EFFORTS[effort]
    return spent.probes if probes is None else probes, spent.measure if measure is None else measure


@dataclass(frozen=True)
class Task:
    """A command."""

    command: Planned
    tokens: tuple[int, ...] = ()
    """Of every prompt; of those that are read as a stream, of the longest."""
    held_out: tuple[int, ...] = ()
    """The same of the prompts that test sets of terms."""
    calibration: tuple[int, ...] = ()
    """The same of the prompts that a pruned model is refitted to, where they are others."""
    processes: int = 1
    """How many may share the prompts, where all weights are in memory and the command's can be shared."""
    gpu: bool = False
    """Whether it computes on a GPU, whose memory is planned then."""
    runs: bool = True
    """Whether the model runs: `lora-diff` without prompts and `check --weights-only` only look at weights."""
    reinitialised: bool = False
    """Whether a second, re-initialised model is wanted beside the first."""
    pruning: PruneOptions | None = None
    """Of `prune-bound`, and of `check` where a rule asks what can go."""
    waiting: int = ABLATION_BYTES
    """Of `prune-bound`: bytes of passes that wait for the next block at the same time, at most."""
    tuned: CheckpointFiles | None = None
    """Of `lora-diff`: a tuned checkpoint, or None for an adapter."""
    changed: tuple[TensorEntry, ...] = ()
    """Of `lora-diff`: the base's parameters that an adapter changes."""
    directions: bool = False
    """Of `lora-diff`: whether directions of large matrices are looked for."""
    every_position: bool = False
    """Of `attribute`: whether each token of a prompt has a target."""
    steps: int = 0
    """Of `attribute`: passes that end where tokens behind a prompt follow: one a greedy token, which is counted in
    `tokens`, and one of a given continuation."""
    top: int = 10
    """Of `attribute`: how many neurons, experts and flows lead."""
    fixed: bool = False
    """Of `compare`: whether the attention matrices of all prompts are kept."""
    patch: bool = False
    """Of `compare`: whether they are, and with them what blocks took and gave."""
    prompts: int = 0
    """How many there are, where `tokens` are of the longest alone."""
    probe: int = 0
    """Tokens of what discovery reads, where that is noise of the shape of a picture or a sound; of texts a few."""

    def targets_of(self, tokens: int) -> int:
        """How many a prompt of so many tokens has."""
        return tokens if self.every_position else max(1, self.steps)

    @property
    def pruned(self) -> PruneOptions:
        """`pruning` of a command that has it."""
        return needed(self.pruning)

    @property
    def chosen_on(self) -> tuple[int, ...]:
        """Tokens of every prompt as `prune-bound` runs it to choose sets."""
        cut = self.pruning is not None and not self.probe  # pictures and sound are left whole
        most = longest(self.tokens, self.pruned.spent) if cut else None
        return self.tokens if most is None else tuple(min(n, most) for n in self.tokens)

    @property
    def tested_on(self) -> tuple[int, ...]:
        """The same of the prompts that test sets; where only some are drawn, of as many."""
        if self.pruning is None or not self.pruning.spent.few_held_out:
            return self.held_out
        return self.held_out[: prompts_needed(self.pruning.exceed, self.pruning.confidence, exceeding=1)]

"""The task that is planned: a command, its prompts, and those of its options that decide how much it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duat_cli.errors import InputError, needed
from duat_cli.kinds import KINDS, WHOLE, Effort, Extra, Kind, MetricName, apart
from duat_cli.models.budgets import ABLATION_BYTES
from duat_cli.statistics.binomial import prompts_needed

if TYPE_CHECKING:
    from duat_cli.loading.checkpoint.headers import TensorEntry
    from duat_cli.loading.checkpoint.preflight import CheckpointFiles
    from duat_cli.results.plan import Planned


@dataclass(frozen=True)
class Spent:
    """How much `duat prune-bound` computes at an effort, unless options say otherwise."""

    probes: int = 32
    measure: int = 16
    points: int = 8
    """How many sets of each order are measured on the prompts, approximately."""
    tested: int = 5
    """How many sets of each order are tested on held-out prompts."""
    certified: bool = True
    """Whether certified bounds are computed."""
    printed: int | None = 4
    """How many prompts Eq. 16 is computed on; None: all."""
    tokens: int | None = 768
    """Tokens of all prompts that choose sets together, approximately: the longest are cut. None: none is cut. Held-out
    prompts are never cut for this."""
    shortest: int = 48
    """Length in tokens below which no prompt is cut for that."""
    few_held_out: bool = False
    """Whether to hold out only as many prompts as it takes to let one of them exceed the budget."""


NO_HOLDOUT = "no held-out prompts: give --holdout 0.5, a share of the prompts, or --holdout FILE of other texts"
RANDOM_SETS = 5  # random sets beside one of duat's
BESIDES = 2  # sets of each order that others are put beside, see `besides`
CRITERIA, BLOCK_CRITERIA = 4, 3  # how many criteria choose sets of a kind, and of whole blocks

EFFORTS: dict[Effort, Spent] = {
    "quick": Spent(
        probes=8, measure=4, points=3, tested=3, certified=False, printed=2, tokens=384, shortest=24, few_held_out=True
    ),
    "default": Spent(),
    "thorough": Spent(probes=128, measure=200, points=20, tested=16, printed=None, tokens=None),
}


@dataclass(frozen=True)
class PruneOptions:
    """Options of `duat prune-bound`."""

    kinds: tuple[Kind, ...] = KINDS
    metric: MetricName | None = None
    probes: int = 32
    measure: int = 16
    budget: float = 0.1
    confidence: float = 0.95
    exceed: float = 0.1
    ablate_mean: bool = False
    uniform: bool = False
    """Whether every FFN loses equally many neurons, and every attention equally many KV heads with their heads."""
    repair: bool = False
    """Whether the rest of the model is refitted."""
    joint: bool = False
    """Whether terms of all kinds go into one set."""
    remove: float | None = None
    """Share of the parameters that a set has to hold, instead of a budget to keep to."""
    of_all: bool = False
    """Whether `remove` is a share of all parameters instead of those of the blocks."""
    criteria: bool = False
    """Whether sets that other criteria choose, and random ones, are run on the held-out prompts."""
    rounds: int = 1
    """How often the model is sketched, each time without the terms that earlier rounds removed."""
    effort: Effort = "default"
    """Effort that sets what is spent; probes and measure come from it unless given."""

    named: int | None = None
    """Number of terms in the set to be written, if a number is asked for."""

    whole: bool = False
    """Whether prompts are left uncut; so with `--out`, which keeps the results of each prompt by itself."""

    def groups(self, kinds: Sequence[Kind]) -> list[tuple[Kind, ...]]:
        """The groups of kinds of which sets are made: each kind by itself, or all together. kinds: that the model
        has."""
        return [tuple(kinds)] if self.joint else [(kind,) for kind in kinds]

    def require_held_out(self, prompts: int) -> None:
        """Raises InputError for so few held-out prompts that they could guarantee no set, and for --criteria without
        any. Otherwise no held-out prompts are fine."""
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
        """How much the effort spends; no prompt is cut with `whole`."""
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
    """How many of `count` terms of a kind are ablated for real.

    Up to four times as many whole parts are, as they are few, and the linear prediction says least about them.
    """
    return min(count, 4 * measure if kind in WHOLE else measure)


def orders(counts: Mapping[Kind, int], options: PruneOptions) -> tuple[list[tuple[Kind, ...]], list[tuple[Kind, ...]]]:
    """The kinds of each order in which terms are removed: first orders whose sets are chosen by prediction, then those
    chosen by the measured damage of each term, which is known later. counts: terms of each kind."""
    there = [kind for kind, count in counts.items() if count]
    found: tuple[list[tuple[Kind, ...]], list[tuple[Kind, ...]]] = [], []
    for kinds in options.groups(there) if there else []:
        found[by_measure({kind: counts[kind] for kind in kinds}, options.measure)].append(kinds)
    return found


def by_measure(counts: Mapping[Kind, int], measure: int) -> bool:
    """Whether sets of these kinds are chosen by the measured damage of each term: whole parts, if all are ablated."""
    return set(counts) <= WHOLE and all(count == ablated(kind, count, measure) for kind, count in counts.items())


def besides(sizes: Sequence[int]) -> list[int]:
    """Those sizes of tested sets that sets of other criteria are put beside: the median and the largest."""
    return sorted({sizes[len(sizes) // 2], sizes[-1]})


def rivals(counts: Mapping[Kind, int], options: PruneOptions) -> int:
    """Most sets that --criteria runs: of other criteria, random ones and duat's own. counts: terms of each kind."""
    if not options.criteria:
        return 0
    found = 0
    for kinds in (kinds for some in orders(counts, options) for kinds in some):
        scores = BLOCK_CRITERIA if kinds == ("block",) else CRITERIA
        once = options.uniform or set(kinds) & WHOLE
        found += BESIDES * (1 + RANDOM_SETS + scores * (1 if once else 2))
    return found


def longest(tokens: Sequence[int], spent: Spent) -> int | None:
    """Length in tokens to which prompts are cut to choose sets; None: none is cut. tokens: of each prompt."""
    if spent.tokens is None or sum(tokens) <= spent.tokens or max(tokens) <= spent.shortest:
        return None
    low, high = spent.shortest, max(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(min(n, middle) for n in tokens) <= spent.tokens else (low, middle)
    return low


def effort_of(effort: Effort, probes: int | None, measure: int | None) -> tuple[int, int]:
    """Probes, and terms to measure, as given or else by the effort."""
    spent = EFFORTS[effort]
    return spent.probes if probes is None else probes, spent.measure if measure is None else measure


@dataclass(frozen=True)
class Task:
    """A command to be planned."""

    command: Planned
    tokens: tuple[int, ...] = ()
    """Tokens of every prompt; only of the longest ones where prompts are read as a stream."""
    held_out: tuple[int, ...] = ()
    """Tokens of the prompts that test sets of terms."""
    calibration: tuple[int, ...] = ()
    """Tokens of the prompts that a pruned model is refitted to, if they are other prompts."""
    processes: int = 1
    """How many processes may share the prompts, where all weights are in memory and the command allows it."""
    gpu: bool = False
    """Whether a GPU computes; its memory is then the one planned."""
    runs: bool = True
    """Whether the model runs: `lora-diff` without prompts and `check --weights-only` only look at weights."""
    reinitialised: bool = False
    """Whether a second, re-initialised model is wanted beside the first."""
    pruning: PruneOptions | None = None
    """Options of `prune-bound`, and of `check` with a rule on what can be removed."""
    waiting: int = ABLATION_BYTES
    """`prune-bound`: most bytes of passes that wait for the next block at the same time."""
    tuned: CheckpointFiles | None = None
    """`lora-diff`: a tuned checkpoint, or None for an adapter."""
    changed: tuple[TensorEntry, ...] = ()
    """`lora-diff`: the base's parameters that an adapter changes."""
    directions: bool = False
    """`lora-diff`: whether directions of large matrices are looked for."""
    every_position: bool = False
    """`attribute`: whether each token of a prompt has a target."""
    steps: int = 0
    """`attribute`: passes that end where tokens behind a prompt follow: one for each greedy token, which `tokens`
    counts, too, and one for a given continuation."""
    extras: frozenset[Extra] = frozenset()
    """`inspect`: what is computed on request, of that which takes memory."""
    top: int = 10
    """`attribute`: how many neurons, experts and flows are listed."""
    fixed: bool = False
    """`compare`: whether the attention matrices of all prompts are kept."""
    patch: bool = False
    """`compare`: whether they are kept together with the inputs and outputs of blocks."""
    prompts: int = 0
    """How many prompts there are, if `tokens` has only the longest."""
    probe: int = 0
    """Tokens of discovery's input if that is noise with the shape of a picture or a sound; for texts it is short."""

    def targets_of(self, tokens: int) -> int:
        """How many targets a prompt of so many tokens has."""
        return tokens if self.every_position else max(1, self.steps)

    @property
    def pruned(self) -> PruneOptions:
        """`pruning` of a command that has it."""
        return needed(self.pruning)

    @property
    def chosen_on(self) -> tuple[int, ...]:
        """Tokens of every prompt, as cut by `prune-bound` to choose sets."""
        cut = self.pruning is not None and not self.probe  # pictures and sound are left whole
        most = longest(self.tokens, self.pruned.spent) if cut else None
        return self.tokens if most is None else tuple(min(n, most) for n in self.tokens)

    @property
    def tested_on(self) -> tuple[int, ...]:
        """Tokens of the prompts that test sets; if only some are drawn, of the first so many."""
        if self.pruning is None or not self.pruning.spent.few_held_out:
            return self.held_out
        return self.held_out[: prompts_needed(self.pruning.exceed, self.pruning.confidence, exceeding=1)]

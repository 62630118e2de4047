"""What a rule is: what it looks at, what it measures, from where on that is a finding, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from duat_cli.checks.answers import Agreement, Answers
from duat_cli.checks.drift import Deviation
from duat_cli.checks.policy import Level, Policy
from duat_cli.checks.weights import WeightFacts
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.declared.facts import Declared
from duat_cli.loading.declared.per_layer import Override

if TYPE_CHECKING:  # models that take a tenth of --weights-only to build, which has none of them
    from duat_cli.results.behaviour import Behaviour
    from duat_cli.results.inspect import InspectReport
    from duat_cli.results.lora import LintFinding
    from duat_cli.results.prune.report import PruneReport

Need = Literal[
    "load", "report", "slack", "behaviour", "predictions", "baseline", "answers", "adapter", "tuned", "declared",
    "tokenizer",
]  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """What is known of a checkpoint; None where it was not looked at, `absent` says why."""

    files: CheckpointFiles
    weights: WeightFacts
    tables: frozenset[str] = frozenset()
    """Matrices of integers that the model's class keeps as such: indices and masks, no quantised weights."""
    unexpected: tuple[str, ...] | None = None
    """Tensors that the class does not use; needs the load."""
    spare: tuple[str, ...] | None = None
    """Missing tensors that do not matter, taken as zero; needs the load."""
    overrides: tuple[Override, ...] | None = None
    """What is declared of single layers, and whether the model obeys it; needs the load."""
    report: InspectReport | None = None
    silent: bool = False
    """Whether there is none because the hidden states are zero."""
    overflow: str | None = None
    """Why there is none, where finite weights give outputs that are NaN or infinite."""
    slack: PruneReport | None = None
    """Neurons and heads alone; only where a rule asks for it, because it takes minutes."""
    behaviour: Behaviour | None = None
    """What the model answers to the prompts."""
    answers: Answers | None = None
    """The same, as a baseline holds it."""
    agreement: Agreement | None = None
    """Of these answers with the baseline's."""
    declared: Declared | None = None
    """What the checkpoint says of itself beside its weights."""
    old: Mapping[str, Any] | None = None
    """The same of the baseline, by key; needs a baseline that holds it."""
    rounding: str = ""
    """How to allow the rounding to another stored dtype, where that may be all that moved the tensors; else empty."""
    retokenised: str = ""
    """How the same prompts were read otherwise than in the baseline; empty where they were not."""
    written: bool = False
    """Whether the model itself wrote what its decoder reads."""
    drift: tuple[Deviation, ...] | None = None
    """Every metric of the baseline or the run; needs --baseline."""
    baseline_file: str = ""
    policy: Policy | None = None
    adapter: tuple[LintFinding, ...] | None = None
    """What the adapter's linter found; needs --adapter."""
    adapter_file: str = ""
    """The adapter's config."""
    absent: dict[Need, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One number of a rule, at one place."""

    value: float
    text: str
    """What was measured, as a sentence with its number."""
    block: int | None = None
    where: str | None = None
    """Tensor, path of a report's field, or file."""
    low: float | None = None
    high: float | None = None
    """Bounds of its own; without both the rule's `max` is its `high` when it is judged."""
    level: Level | None = None
    """A level of its own; None is the rule's."""
    grave: bool = False
    """An error although the rule warns as shipped; a user's own policy that names the rule stands over it."""
    source: str | None = None
    """Where its own bounds come from."""
    key: tuple[str, str] | None = None
    """(file, key in it) that a reader may want to edit."""
    advice: str | None = None
    """What to do about it, where that is not the rule's advice."""
    undefined: Literal["", "fail", "pass", "skip"] = ""
    """There is no value (0 stands for it): whether that is a finding, or all is well for that reason, or nothing is
    known; a rule of which nothing is known is skipped."""

    @property
    def beyond(self) -> float:
        """How far outside; at most 0 where it passes. NaN counts as outside."""
        sides = [] if self.high is None else [self.value - self.high]
        sides += [] if self.low is None else [self.low - self.value]
        nan = math.isnan(self.value) or any(map(math.isnan, sides))
        return math.inf if nan else max(sides, default=-math.inf)

    @property
    def tightness(self) -> float:
        """How much of the room is used: 1 at the bound, whatever the unit."""
        if self.low is not None and self.high is not None:
            half = (self.high - self.low) / 2
            return abs(self.value - self.low - half) / half if half else 0.0
        if self.high is not None:
            return self.value / self.high if self.high else self.value
        return 0.0 if self.low is None else -self.value

    @property
    def fails(self) -> bool:
        return self.undefined == "fail" or (not self.undefined and self.beyond > 0)


@dataclass(frozen=True)
class Rule:
    """A check with a stable id. A measurement above `max` is a finding."""

    id: str
    about: str
    """What it looks at, for the list of rules."""
    advice: str
    """One sentence: what to do about a finding."""
    measure: Callable[[Evidence, Settings], Iterable[Measurement]]
    needs: tuple[Need, ...] = ()
    """What must have been looked at besides files and weights."""
    level: Level = "error"
    max: float | None = 0.0
    """None: the evidence brings its own, or there is nothing to compare."""
    unit: str = ""
    allowed: tuple[str, ...] | None = None
    """Values that the rule lets pass, for rules about kinds of things."""
    metric: Literal["sum", "largest"] | None = None
    """What a baseline holds of its measurements, under its id; None where it holds nothing of them."""


@dataclass(frozen=True)
class Settings:
    """A rule as a policy has it, and where each of its settings comes from."""

    rule: Rule
    level: Level
    max: float | None
    allowed: tuple[str, ...] | None
    level_source: str = "built in"
    max_source: str = "built in"
    key: tuple[str, str] | None = None
    """(the user's file that names the rule, its key there); None for what is built in or shipped."""

    @property
    def on(self) -> bool:
        """Whether the rule is looked at."""
        return self.level != "off"

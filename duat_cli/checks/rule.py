"""The parts of a rule: its evidence, its measurements, the threshold for a finding, and the advice."""

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

if TYPE_CHECKING:  # building these models takes a tenth of the time of --weights-only, which does not use them
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
    """The facts known of a checkpoint; None where something was not looked at, for the reason in `absent`."""

    files: CheckpointFiles
    weights: WeightFacts
    tables: frozenset[str] = frozenset()
    """Integer matrices that the model's class keeps as integers: indices and masks, not quantised weights."""
    unexpected: tuple[str, ...] | None = None
    """Tensors that the class does not use; needs the load."""
    spare: tuple[str, ...] | None = None
    """Missing tensors that do not matter, taken as zero; needs the load."""
    overrides: tuple[Override, ...] | None = None
    """Settings declared for single layers, and whether the model obeys them; needs the load."""
    report: InspectReport | None = None
    silent: bool = False
    """Whether there is no report because the hidden states are zero."""
    overflow: str | None = None
    """Why there is no report, where finite weights give outputs that are NaN or infinite."""
    slack: PruneReport | None = None
    """Pruning report of neurons and heads; only where a rule asks for it, because it takes minutes."""
    behaviour: Behaviour | None = None
    """Measurements of the model's answers to the prompts."""
    answers: Answers | None = None
    """The answers, as a baseline holds them."""
    agreement: Agreement | None = None
    """The comparison of these answers with the baseline's."""
    declared: Declared | None = None
    """The checkpoint's declarations beside its weights."""
    old: Mapping[str, Any] | None = None
    """The declarations of the baseline, by key; needs a baseline that holds them."""
    rounding: str = ""
    """How to allow the rounding to another stored dtype, where that may explain all moved tensors; else empty."""
    retokenised: str = ""
    """How the same prompts were read differently than in the baseline; empty where they were not."""
    written: bool = False
    """Whether the model itself wrote the tokens that its decoder reads."""
    drift: tuple[Deviation, ...] | None = None
    """The deviations of all metrics of baseline and run; needs --baseline."""
    baseline_file: str = ""
    policy: Policy | None = None
    adapter: tuple[LintFinding, ...] | None = None
    """Findings of the adapter's linter; needs --adapter."""
    adapter_file: str = ""
    """The adapter's config file."""
    absent: dict[Need, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One number of a rule, at one place."""

    value: float
    text: str
    """A sentence on what was measured, with the number."""
    block: int | None = None
    where: str | None = None
    """Tensor, path of a report's field, or file."""
    low: float | None = None
    high: float | None = None
    """Bounds of its own; without either, it is judged with the rule's `max` as `high`."""
    level: Level | None = None
    """A level of its own; None for the rule's."""
    grave: bool = False
    """Whether it is an error although the rule as shipped warns; a user's policy that names the rule overrides this."""
    source: str | None = None
    """The source of its own bounds."""
    key: tuple[str, str] | None = None
    """(file, key in it) that a reader may want to edit."""
    advice: str | None = None
    """Advice in place of the rule's."""
    undefined: Literal["", "fail", "pass", "skip"] = ""
    """Set where there is no value (0 stands for it): "fail", that is a finding; "pass", all is well for that reason;
    "skip", nothing is known. A rule of which nothing is known is skipped."""

    @property
    def beyond(self) -> float:
        """How far the value is outside its bounds; at most 0 where it passes. NaN counts as outside."""
        sides = [] if self.high is None else [self.value - self.high]
        sides += [] if self.low is None else [self.low - self.value]
        nan = math.isnan(self.value) or any(map(math.isnan, sides))
        return math.inf if nan else max(sides, default=-math.inf)

    @property
    def tightness(self) -> float:
        """The used share of the allowed range, without a unit: 1 at the bound."""
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
    """The subject of the rule, for the list of rules."""
    advice: str
    """One sentence on what to do about a finding."""
    measure: Callable[[Evidence, Settings], Iterable[Measurement]]
    needs: tuple[Need, ...] = ()
    """The evidence that it needs beside files and weights."""
    level: Level = "error"
    max: float | None = 0.0
    """The threshold; None where measurements bring their own bounds, or nothing is compared."""
    unit: str = ""
    allowed: tuple[str, ...] | None = None
    """Values that the rule lets pass, for rules about values that are no numbers."""
    metric: Literal["sum", "largest"] | None = None
    """Sum or largest of its measurements that a baseline holds under its id; None where it holds neither."""


@dataclass(frozen=True)
class Settings:
    """The settings of a rule under a policy, and where each of them comes from."""

    rule: Rule
    level: Level
    max: float | None
    allowed: tuple[str, ...] | None
    level_source: str = "built in"
    max_source: str = "built in"
    key: tuple[str, str] | None = None
    """(the user's file that names the rule, its key there); None for settings that are built in or shipped."""

    @property
    def on(self) -> bool:
        """Whether the rule is judged."""
        return self.level != "off"

"""What is planned: a command, its prompts, and those of its options that decide how much it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duat_cli.errors import InputError
from duat_cli.kinds import KINDS, Kind, MetricName

if TYPE_CHECKING:
    from duat_cli.results.plan import Planned

if TYPE_CHECKING:
    from duat_cli.loading.checkpoint.preflight import CheckpointFiles


@dataclass(frozen=True)
class PruneOptions:
    """What `duat prune-bound` computes."""

    kinds: tuple[Kind, ...] = KINDS
    metric: MetricName | None = None
    probes: int = 32
    measure: int = 24
    budget: float = 0.1
    confidence: float = 0.95
    exceed: float = 0.1
    ablate_mean: bool = False
    uniform: bool = False
    """Whether every FFN is to lose as many neurons."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.budget) or self.budget <= 0:
            raise InputError(f"--budget {self.budget:g}: expected a number above 0, in the metric's unit")
        for name, value in (("--confidence", self.confidence), ("--exceed", self.exceed)):
            if not 0 < value < 1:
                raise InputError(f"{name} {value:g}: expected a number between 0 and 1, such as 0.95")
        if self.uniform and "neuron" not in self.kinds:
            raise InputError("--uniform: is about neurons; add neuron to --granularity")


@dataclass(frozen=True)
class Task:
    """A command."""

    command: Planned
    tokens: tuple[int, ...] = ()
    """Of every prompt."""
    held_out: tuple[int, ...] = ()
    """The same of the prompts that test sets of terms."""
    runs: bool = True
    """Whether the model runs: `lora-diff` without prompts and `check --weights-only` only look at weights."""
    reinitialised: bool = False
    """Whether a second, re-initialised model is wanted beside the first."""
    pruning: PruneOptions | None = None
    """Of `prune-bound`, and of `check` where a rule asks what can go."""
    tuned: CheckpointFiles | None = None
    """Of `lora-diff`: a tuned checkpoint, or None for an adapter."""
    changed: int = 0
    """Of `lora-diff`: elements of the parameters that an adapter changes."""

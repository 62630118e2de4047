"""What is planned: a command, its prompts, and those of its options that decide how much it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

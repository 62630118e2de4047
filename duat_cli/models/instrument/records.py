"""What one call of a block did, and what a replay of it is given and gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.instrument.activations import Extremes
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.functions.clamps import HeldClamp
from duat_cli.models.instrument.mixer import MixerCall


class ReplayStop(Exception):  # noqa: N818 - a signal, not an error
    """Ends a replay as soon as the attention function has seen the values."""


@dataclass(frozen=True)
class UnitCall:
    """One call of an FFN unit: its input, its output and what else it returned (router logits, say)."""

    module: nn.Module
    input: Tensor
    output: Tensor
    rest: tuple[Any, ...] | None
    behind_attention: bool  # whether attention had run before it

    def returning(self, tensor: Tensor) -> Any:
        return tensor if self.rest is None else (tensor, *self.rest)


@dataclass
class Recording:
    """What one call of a block did, by module and call order."""

    norms: dict[nn.Module, list[FrozenNorm]] = field(default_factory=lambda: defaultdict(list))
    units: list[UnitCall] = field(default_factory=list)
    linears: dict[nn.Module, Tensor] = field(default_factory=dict)  # first linear -> its output
    attention: list[AttentionCall] = field(default_factory=list)
    gates: dict[nn.Module, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # of gated attention
    clamps: dict[nn.Module, list[HeldClamp]] = field(default_factory=lambda: defaultdict(list))  # of clipped attention
    extremes: Extremes = field(default_factory=Extremes)  # of the outputs of norms and attention
    attention_rests: dict[nn.Module, tuple[Any, ...] | None] = field(default_factory=dict)  # its other outputs
    mixers: dict[nn.Module, MixerCall] = field(default_factory=dict)  # of mixers without softmax


@dataclass
class Replay:
    """The result of replaying a block on a batch of items; every tensor has the items in front."""

    output: Tensor | None = None  # (items, N, M)
    values: list[Tensor] = field(default_factory=list)  # a call: (items, kv_heads, N, d)
    mixed: list[Tensor] = field(default_factory=list)  # H V, a call: (items, N, heads, d)
    unit_inputs: list[Tensor] = field(default_factory=list)  # a unit call: (items, N, width)
    points: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # norm, unit inputs, not before attention


@dataclass
class Substitutes:
    """What a replay in progress returns in place of what."""

    items: int
    given: Sequence[Tensor]  # per unit call, in call order: its output
    attention: Tensor | None  # (items, N, heads, d), in place of H V
    stop_at_values: bool
    result: Replay
    calls: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    unit_calls: int = 0
    attention_calls: int = 0

    def by_item(self, x: Tensor) -> Tensor:
        """(items, N or N * heads, width), however the model folds batch and tokens."""
        return x.reshape(self.items, -1, x.shape[-1])

    def next_call(self, module: nn.Module) -> int:
        self.calls[module] += 1
        return self.calls[module] - 1


def stacked(singles: list[Replay]) -> Replay:
    first = singles[0]

    def cat(name: str) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*(getattr(s, name) for s in singles), strict=True)]

    points = [(module, torch.cat([s.points[k][1] for s in singles])) for k, (module, _) in enumerate(first.points)]
    output = None if first.output is None else torch.cat([s.output for s in singles if s.output is not None])
    return Replay(output, cat("values"), cat("mixed"), cat("unit_inputs"), points)

"""Probability of a target under the model's own output, and the most probable other token or class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duat_cli.analysis.attribute.targets import Target
from duat_cli.models.discovery.causality import class_count


@dataclass(frozen=True)
class Odds:
    """Probabilities by softmax over all tokens, or classes."""

    own: float
    rival: int
    """The most probable other token or class."""
    rivals: float


def has_odds(model: Any, target: Target, entries: int) -> bool:
    """Whether a target has a probability in an output with so many entries: tokens do, and classes if the model has
    exactly one for each entry."""
    if target.kind == "class":
        return class_count(model) == entries
    return target.kind in ("token", "log-probability")


def odds_of(model: Any, target: Target, output: Tensor) -> Odds | None:
    """The odds of a target in an output, (1, N, vocabulary) or (1, classes), computed in float64; None without
    `has_odds`."""
    row = target.row(output)
    if target.token is None or not has_odds(model, target, len(row)):
        return None
    found = row.double().softmax(dim=-1)
    others = found.clone()
    others[target.token] = -1.0
    rival = int(others.argmax())
    return Odds(float(found[target.token]), rival, float(found[rival]))

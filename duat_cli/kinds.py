"""The kinds of terms that a model can lose, the measures of the damage, the commands that are planned, and what
is patched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

MetricName = Literal["hidden", "kl", "nll"]
Kind = Literal["neuron", "head", "expert", "ffn", "attention", "block"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WHOLE: frozenset[Kind] = frozenset(("ffn", "attention", "block"))  # few, and of much effect each
Effort = Literal["quick", "default", "thorough"]
Planned = Literal["inspect", "verify", "matrix", "prune-bound", "lora-diff", "check", "attribute", "compare"]
Patched = Literal["blocks", "heads", "tokens"]  # what `compare --patch` puts into another prompt's pass
NAMES: dict[str, str] = {
    "neuron": "neurons",
    "head": "heads",
    "expert": "experts",
    "ffn": "FFNs",
    "attention": "attentions",
    "block": "blocks",
}
_INSIDE: dict[Kind, set[Kind]] = {  # of a kind: the kinds whose terms it is a part of
    "neuron": {"ffn", "block"},
    "head": {"attention", "block"},
    "expert": {"ffn", "block"},
    "ffn": {"block"},
    "attention": {"block"},
}


def names_of(granularity: str) -> str:
    """The terms of kinds that are joined by commas, such as neurons and heads."""
    return " and ".join(NAMES[kind] for kind in granularity.split(","))


def apart(kinds: Sequence[Kind]) -> bool:
    """Whether there are several, none of which has terms that are parts of another's, so that one set may have all."""
    return len(kinds) > 1 and not any(_INSIDE.get(kind, set()) & set(kinds) for kind in kinds)

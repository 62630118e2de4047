"""The kinds of terms that can be removed from a model, the metrics of damage, the commands that can be planned, and
what is patched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

MetricName = Literal["hidden", "kl", "nll"]
Kind = Literal["neuron", "head", "expert", "ffn", "attention", "block"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WHOLE: frozenset[Kind] = frozenset(("ffn", "attention", "block"))  # kinds with few terms, each of large effect
Effort = Literal["quick", "default", "thorough"]
Planned = Literal["inspect", "verify", "matrix", "prune-bound", "lora-diff", "check", "attribute", "compare"]
Extra = Literal["spectrum", "terms", "end_to_end", "routing"]  # options of `inspect` that take more memory
Patched = Literal["blocks", "heads", "tokens"]  # what `compare --patch` puts into another prompt's pass
NAMES: dict[str, str] = {
    "neuron": "neurons",
    "head": "heads",
    "expert": "experts",
    "ffn": "FFNs",
    "attention": "attentions",
    "block": "blocks",
}
_INSIDE: dict[Kind, set[Kind]] = {  # kind -> kinds whose terms it is a part of
    "neuron": {"ffn", "block"},
    "head": {"attention", "block"},
    "expert": {"ffn", "block"},
    "ffn": {"block"},
    "attention": {"block"},
}


def names_of(granularity: str) -> str:
    """Names of the terms of several kinds, given as kinds joined by commas; for example "neurons and heads"."""
    return " and ".join(NAMES[kind] for kind in granularity.split(","))


def apart(kinds: Sequence[Kind]) -> bool:
    """Whether there are several kinds, and no kind's terms are parts of another's, so that one set may contain all of
    them."""
    return len(kinds) > 1 and not any(_INSIDE.get(kind, set()) & set(kinds) for kind in kinds)

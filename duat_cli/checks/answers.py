"""The answers that a baseline holds, and how far a run's are from them.

Most likely tokens are compared one by one. Another machine, or weights rounded to another dtype, turns a near tie the
other way; so the baseline also holds each prediction's margin, the first logit less the second over the standard
deviation of the logits, and a token that changes where both runs' margins are within `NEAR_TIE` is none that changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from duat_cli.results.base import Finite
from duat_cli.results.behaviour import Behaviour, Predicts
from duat_cli.text import plural

LIMIT = 1024
"""Most predictions that a baseline holds; of more every second, third, … is taken, over all prompts."""
NEAR_TIE = {"float64": 1e-4, "float32": 0.01, "float16": 0.05, "bfloat16": 0.2}
"""Margins that rounding in that dtype may turn."""
CHANGED = {"float64": 0.0, "float32": 0.0, "float16": 0.002, "bfloat16": 0.01}
"""Share of tokens that may change beyond that: in half precision a few margins move further."""
TURNED = {"float64": 1e-8, "float32": 1e-6, "float16": 1e-4, "bfloat16": 2e-3}
"""1 - cosine that rounding in that dtype may make of an embedding."""

SketchNumbers = Annotated[list[Finite], Field(min_length=1)]


class Answers(BaseModel):
    """What a model answered to the prompts of a baseline, one entry a prediction or a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    predicts: Predicts
    tokens: list[int] = []
    """The most likely token of each prediction."""
    margins: list[Finite] = []
    """How far it is ahead of the second, in standard deviations of the logits."""
    embeddings: list[SketchNumbers] = []
    """Of each prompt's embedding of length 1, its sketch."""


@dataclass(frozen=True)
class Agreement:
    """A run's answers against a baseline's."""

    distance: float
    """Share of tokens that changed, or 1 - cosine of the embeddings."""
    allowed: float
    text: str
    near_ties: int | None = None
    error: float | None = None
    """Standard error of a cosine, at most."""


def agreement(before: Answers, now: Answers, dtype: str) -> Agreement | str:
    """Of two runs on the same prompts, or why there is none. dtype: the one whose rounding is allowed."""
    if before.predicts != now.predicts:
        return f"the baseline's model predicts another thing ({before.predicts}; this one: {now.predicts})"
    if before.predicts == "embedding":
        return _cosine(before.embeddings, now.embeddings, TURNED[dtype])
    if len(before.tokens) != len(now.tokens) or len(before.margins) != len(before.tokens):
        return f"the baseline holds {len(before.tokens)} predictions, this run has {len(now.tokens)}"
    if not now.tokens:
        return "nothing was predicted"
    return _tokens(before, now, dtype)


def _tokens(before: Answers, now: Answers, dtype: str) -> Agreement:
    pairs = zip(before.tokens, now.tokens, before.margins, now.margins, strict=True)
    margins = [max(margin, own) for old, new, margin, own in pairs if old != new]
    ties = sum(margin <= NEAR_TIE[dtype] for margin in margins)
    changed, count = len(margins) - ties, len(now.tokens)
    tied = f"; {plural(ties, 'near tie')} turned" if ties else ""
    text = f"the most likely token is the baseline's in {count - changed} of {count} predictions{tied}"
    return Agreement(changed / count, CHANGED[dtype], text, near_ties=ties)


def _cosine(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]], allowed: float) -> Agreement | str:
    if list(map(len, before)) != list(map(len, now)) or not now:
        return f"the baseline holds {len(before)} embeddings, this run has {len(now)}"
    # |e - e'|² / 2 of unit vectors is 1 - cosine; the sketch's estimate of it is off by half of it, one standard error
    far = [
        math.fsum((a - b) ** 2 for a, b in zip(old, new, strict=True)) / len(old) / 2
        for old, new in zip(before, now, strict=True)
    ]
    mean = math.fsum(far) / len(far)
    error = math.sqrt(math.fsum((one / 2) ** 2 for one in far)) / len(far)
    text = f"the embeddings' cosine to the baseline's is about {1 - mean:.6g} (standard error {error:.1g})"
    return Agreement(mean, allowed, text, error=error)


def compared(behaviour: Behaviour, found: Agreement | str) -> Behaviour:
    """A run's behaviour with its agreement, or why there is none."""
    values: dict[str, float | int | None] = dict.fromkeys(("agreement", "near_ties", "cosine", "cosine_error"))
    embeds = behaviour.predicts == "embedding"
    if not isinstance(found, str):
        values |= (
            {"cosine": 1 - found.distance, "cosine_error": found.error}
            if embeds
            else {"agreement": 1 - found.distance, "near_ties": found.near_ties}
        )
        found = "embeddings are compared by their cosine" if embeds else "predictions are compared token by token"
    kept = {name: why for name, why in behaviour.reasons.items() if name not in values}
    missing = {name: found for name, value in values.items() if value is None}
    return behaviour.model_copy(update={**values, "reasons": kept | missing})

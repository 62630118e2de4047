"""The answers that a baseline holds, compared with those of a run.

The most likely tokens, or classes, are compared one by one. On another machine, or with weights rounded to another
dtype, a near tie may turn. So the baseline also holds each prediction's margin, the first logit less the second over
the standard deviation of the logits; a token that differs is not counted if both runs' margins are within `NEAR_TIE`.
For classes, of which there may be only two, the margin is the difference of the logits, in nats, and the probabilities
are held as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from duat_cli.results.base import Finite, finite
from duat_cli.results.behaviour import CLASSES, NOT_FINITE, Behaviour, Predicts
from duat_cli.text import plural

LIMIT = 1024
"""Largest number of predictions that a baseline holds; of more every second, third, … over all prompts is held."""
NUMBERS = 1 << 14
"""Largest number of probabilities that a baseline holds; of more they are thinned out in the same way."""
NEAR_TIE = {"float64": 1e-4, "float32": 0.01, "float16": 0.05, "bfloat16": 0.2}
"""Margins below which rounding in the dtype may change the prediction."""
CHANGED = {"float64": 0.0, "float32": 0.0, "float16": 0.002, "bfloat16": 0.01}
"""Share of tokens beyond near ties that may change: in half precision a few margins move further."""
TURNED = {"float64": 1e-8, "float32": 1e-6, "float16": 1e-4, "bfloat16": 2e-3}
"""1 - cosine by which rounding in the dtype may turn an embedding."""
DIVERGED = {dtype: margin**2 / 8 for dtype, margin in NEAR_TIE.items()}
"""KL of the classes, nats, that rounding may cause: that of two even classes whose logits move apart by a near tie."""

SketchNumbers = Annotated[list[Finite], Field(min_length=1)]


class Answers(BaseModel):
    """A model's answers to the prompts of a baseline, with one entry per prediction or prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    predicts: Predicts
    tokens: list[int] = []
    """The most likely token, or class, of each prediction."""
    margins: list[Finite] = []
    """The margin of each to the second, in standard deviations of the logits; of a class in nats."""
    probabilities: list[list[Finite]] = []
    """The probabilities of the classes, for each prediction; empty where they are not finite."""
    embeddings: list[SketchNumbers] = []
    """The sketch of each prompt's embedding, scaled to length 1."""


@dataclass(frozen=True)
class Agreement:
    """The comparison of a run's answers with a baseline's."""

    distance: float
    """Share of tokens or classes that changed, or 1 - cosine of the embeddings."""
    allowed: float
    text: str
    near_ties: int | None = None
    error: float | None = None
    """Upper bound on the standard error of the cosine; None where predictions are compared."""
    embeddings: Agreement | None = None
    """The comparison of the embeddings that a classifier has beside its classes."""
    kl: float | None = None
    """Mean KL of the classes' distributions, nats; infinite where a class has probability zero now."""
    kl_allowed: float = 0.0
    without: str = "a baseline holds no distributions but those of a classifier"
    """The reason why numbers of other comparisons are missing here."""


def every(predictions: int, entries: int) -> int:
    """n, where every n-th prediction is held, for so many predictions with so many numbers each."""
    return max(1, -(-predictions // LIMIT), -(-predictions * entries // NUMBERS))


def agreement(before: Answers, now: Answers, dtype: str) -> Agreement | str:
    """The comparison of two runs on the same prompts, or why there is none. dtype: rounding to it is allowed."""
    if before.predicts == now.predicts == "embedding":
        return _cosine(before.embeddings, now.embeddings, TURNED[dtype])
    if before.predicts != now.predicts:
        if "embedding" not in (before.predicts, now.predicts) or not (before.embeddings and now.embeddings):
            return f"the baseline's model predicts another thing ({before.predicts}; this one: {now.predicts})"
        found = _cosine(before.embeddings, now.embeddings, TURNED[dtype])
        why = "the baseline holds no classes; --update-baseline adds them"
        return found if isinstance(found, str) or now.predicts == "embedding" else replace(found, without=why)
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
    tied = f"; {plural(ties, 'of the others is a near tie', 'of the others are near ties')}" if ties else ""
    what = "class" if now.predicts in CLASSES else "token"
    text = f"the most likely {what} is the baseline's in {count - len(margins)} of {count} predictions{tied}"
    found = Agreement(changed / count, CHANGED[dtype], text, near_ties=ties)
    if now.predicts not in CLASSES:
        return found
    turned = _cosine(before.embeddings, now.embeddings, TURNED[dtype])
    beside = None if isinstance(turned, str) else turned
    return replace(found, embeddings=beside, **_divergence(before, now, dtype))


def _divergence(before: Answers, now: Answers, dtype: str) -> dict[str, Any]:
    """Fields of `Agreement`: the KL of the classes, or the reason why there is none."""
    was, are = before.probabilities, now.probabilities
    if len(was) != len(are) or not all(map(sum, [*was, *are])):
        return {"without": NOT_FINITE}
    if len(was[0]) != len(are[0]):
        return {"without": f"the baseline's distributions are over {len(was[0])} classes, here over {len(are[0])}"}
    each = [_kl(p, q) for p, q in zip(was, are, strict=True)]
    return {"kl": math.fsum(each) / len(each), "kl_allowed": DIVERGED[dtype]}


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL of two distributions, nats. Their numbers have six digits and sum to 1 only up to that rounding."""
    room = math.fsum(q) / math.fsum(p)
    pairs = [(a / math.fsum(p), a, b) for a, b in zip(p, q, strict=True) if a]
    if any(not b for _, _, b in pairs):
        return math.inf
    return max(0.0, math.fsum(share * math.log(a / b * room) for share, a, b in pairs))


def _cosine(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]], allowed: float) -> Agreement | str:
    if list(map(len, before)) != list(map(len, now)) or not now:
        return f"the baseline holds {len(before)} embeddings, this run has {len(now)}"
    # |e - e'|² / 2 of unit vectors is 1 - cosine; the standard error of its estimate by the sketches is half of it
    far = [
        math.fsum((a - b) ** 2 for a, b in zip(old, new, strict=True)) / len(old) / 2
        for old, new in zip(before, now, strict=True)
    ]
    mean = math.fsum(far) / len(far)
    error = math.sqrt(math.fsum((one / 2) ** 2 for one in far)) / len(far)
    text = f"the embeddings' cosine to the baseline's is about {1 - mean:.6g} (standard error {error:.1g})"
    return Agreement(mean, allowed, text, error=error)


def compared(behaviour: Behaviour, found: Agreement | str) -> Behaviour:
    """A run's behaviour with the numbers of its agreement, or with the reasons why they are missing."""
    values: dict[str, float | int | None] = dict.fromkeys(("agreement", "near_ties", "kl", "cosine", "cosine_error"))
    missing = dict.fromkeys(values, found if isinstance(found, str) else "predictions are compared one by one")
    turned = found if isinstance(found, str) or found.error is not None else found.embeddings
    if isinstance(turned, Agreement):
        values |= {"cosine": 1 - turned.distance, "cosine_error": turned.error}
    if isinstance(found, Agreement) and found is turned:
        by_cosine = "embeddings are compared by their cosine"
        missing = dict.fromkeys(values, found.without if behaviour.predicts in CLASSES else by_cosine)
    elif isinstance(found, Agreement):
        kl = None if found.kl is None else finite(found.kl)
        values |= {"agreement": 1 - found.distance, "near_ties": found.near_ties, "kl": kl}
        missing["kl"] = found.without if found.kl is None else NOT_FINITE
    kept = {name: why for name, why in behaviour.reasons.items() if name not in values}
    missing = {name: missing[name] for name, value in values.items() if value is None}
    return behaviour.model_copy(update={**values, "reasons": kept | missing})

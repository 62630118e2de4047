"""Comparison of a run with its baseline, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from duat_cli.checks.baseline import (
    BEHAVIOUR,
    Baseline,
    BaselineFile,
    BaselineModel,
    BaselinePrompts,
    Value,
    identity,
    may_be_of,
    metric_of,
    stored_floats,
    tensor_key,
)
from duat_cli.checks.policy import Policy
from duat_cli.checks.tolerances import COARSENESS, Tolerance, tolerance
from duat_cli.checks.weights import WeightFacts, distance
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.dtypes import RUN_IN
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.text import clean, natural, plural, shown

# |W - W'| / sqrt(|W|^2 + |W'|^2) is 1 for independent tensors, with a standard error of a quarter from the sketch. For
# another model its root mean square over the matrices, where this error averages out, is near 1, and none are related
_RELATED, _FOREIGN = 0.2, 0.8

Status = Literal["within", "beyond", "better", "vanished", "new"]


@dataclass(frozen=True)
class Deviation:
    """One metric in this run and in the baseline."""

    key: str
    status: Status
    old: Value | None
    new: Value | None
    change: float
    """Difference of a number, or relative distance of a tensor; 0 where one side is missing, infinite where the shapes
    differ."""
    tolerance: Tolerance | None
    reason: str | None = None
    """Why a vanished metric has no value, if that is known; for a tensor of another shape both shapes."""
    slack: float = 0.0
    """Amount that the metric's own interval adds to the tolerance."""


def compare(
    baseline: Baseline,
    metrics: Mapping[str, Value],
    reasons: Mapping[str, str],
    slack: Mapping[str, float],
    policy: Policy,
    dtype: str,
    *,
    forward: bool,
    shapes: Mapping[str, list[int]],
) -> tuple[Deviation, ...]:
    """The deviations of all metrics of run and baseline. slack: amount to add to a tolerance, by metric. forward:
    whether metrics of the forward pass are compared. shapes: shape of each tensor, by name."""
    own, reshaped = policy.tolerances(), _reshaped(baseline, shapes)
    embeds = baseline.answers is not None and baseline.answers.predicts == "embedding"
    found = []
    for key in sorted({*metrics, *baseline.metrics}, key=natural):
        old, new = baseline.metrics.get(key), metrics.get(key)
        if not forward and metric_of(key).kind == "field":
            continue
        if new is None:
            found.append(Deviation(key, "vanished", old, None, 0.0, None, reasons.get(key)))
        elif old is None and key.startswith(f"{BEHAVIOUR}.") and embeds:
            continue  # the baseline did not look at predictions; the rule on answers reports that
        elif old is None:
            found.append(Deviation(key, "new", None, new, 0.0, None))
        elif key in reshaped:
            limit = tolerance(key, dtype, own)
            found.append(Deviation(key, "beyond", old, new, math.inf, limit, reshaped[key]))
        else:
            found.append(_deviation(key, old, new, tolerance(key, dtype, own), slack.get(key, 0.0)))
    return tuple(found)


def _reshaped(baseline: Baseline, shapes: Mapping[str, list[int]]) -> dict[str, str]:
    """Key -> both shapes, for every tensor of another shape than in the baseline, if the baseline holds shapes."""
    both = ((name, old, shapes.get(name, old)) for name, old in (baseline.shapes or {}).items())
    return {
        tensor_key(name): f"{'x'.join(map(str, old))} → {'x'.join(map(str, new))}"
        for name, old, new in both
        if old != new
    }


def _deviation(key: str, old: Value, new: Value, limit: Tolerance, slack: float) -> Deviation:
    if isinstance(old, list) != isinstance(new, list):
        return Deviation(key, "vanished", old, None, 0.0, None, "the baseline's entry is of another kind")
    if isinstance(old, list) and isinstance(new, list):
        change = distance(new, old)
        return Deviation(key, "within" if change <= limit.atol + limit.rtol else "beyond", old, new, change, limit)
    assert not isinstance(old, list)
    assert not isinstance(new, list)
    change, (low, high) = new - old, limit.ends(old, slack)
    if low <= new <= high:
        return Deviation(key, "within", old, new, change, limit, slack=slack)
    better = limit.better is not None and (change < 0) == (limit.better == "lower")
    return Deviation(key, "better" if better else "beyond", old, new, change, limit, slack=slack)


# --- whose baseline it is ---------------------------------------------------------------------------------------


def refuse_foreign(
    found: BaselineFile,
    files: CheckpointFiles,
    weights: WeightFacts,
    metrics: Mapping[str, Value],
    dtype: str | None,
    prompts: BaselinePrompts | None,
) -> None:
    """Raises InputError where the baseline belongs to another model, prompt set or dtype of the arithmetic."""
    where, old = found.where, found.content
    refuse_other_model(found, files, weights, metrics)
    if dtype and old.dtype and dtype != old.dtype:
        raise InputError(f"{where}: made with --dtype {shown(old.dtype)}, this run has {dtype}; run with the same")
    if prompts and old.prompts and prompts.sha256 != old.prompts.sha256 and not same_texts(prompts, old.prompts):
        known = (
            "" if old.prompts.texts else "; where these are the same, the tokenizer or the model's positions changed"
        )
        sizes = [(one.count, one.tokens) for one in (old.prompts, prompts)]
        here = (
            "as many, of other content or in another order"
            if sizes[0] == sizes[1]
            else "this run has {} and {}".format(*sizes[1])
        )
        raise InputError(
            f"{where}: made with another prompt set ({old.prompts.count} prompts, {old.prompts.tokens} tokens; {here})"
            f": give the same prompts, files, --stack, --decoder-prompt, --max-tokens and --chat{known}"
        )


def same_texts(one: BaselinePrompts, other: BaselinePrompts) -> bool:
    """Whether the same texts were given; False where a baseline does not hold that."""
    return one.texts is not None and one.texts == other.texts


def retokenised(old: BaselinePrompts | None, new: BaselinePrompts | None, *, written: bool) -> str:
    """The sentence that says how the same texts or files became other tokens or tensors; empty where they did not, or
    where it is not known. written: whether the model itself wrote the tokens that its decoder reads."""
    if old is None or new is None or not same_texts(old, new):
        return ""
    if old.sha256 == new.sha256 and (old.ids is None or old.ids == new.ids):
        return ""
    was, now = (f"{plural(p.tokens, 'token')} of {plural(p.count, 'prompt')}" for p in (old, new))
    if written:
        return (
            f"the model writes other tokens for its decoder to read: {was} → {now}; numbers of the forward pass are "
            "not compared, which --decoder-prompt for baseline and run would allow"
        )
    return (
        f"the same prompts are read otherwise: {was} → {now}; tokenizer, processor, positions, or what a decoder is "
        "given to read changed, and numbers of the forward pass are not compared"
    )


def by_rounding(found: BaselineFile, files: CheckpointFiles, drift: Iterable[Deviation], limit_dtype: str) -> str:
    """The text on how to allow the rounding to another stored dtype, where that is not allowed and explains how far all
    tensors moved; else empty.

    The same values in another dtype are no fault; values that moved further are one.
    """
    here, old = stored_floats(files), found.content.stored
    moved = [d.change for d in drift if d.status == "beyond" and metric_of(d.key).kind == "tensor"]
    if here == old or not moved:
        return ""
    coarsest = max((RUN_IN.get(d, "float32") for d in {*here, *old}), key=lambda d: COARSENESS[d])
    room = tolerance(tensor_key(""), coarsest, {}).atol
    if COARSENESS[coarsest] <= COARSENESS[limit_dtype] or max(moved) > room:
        return ""
    was, now = (", ".join(map(clean, names)) or "nothing" for names in (old, here))
    return (
        f"{found.where}: of a checkpoint stored as {was}, this one is {now}: another dtype; allow its rounding by "
        f'[drift] dtype = "{coarsest}" in the policy'
    )


def refuse_other_type(where: str, model: BaselineModel, files: CheckpointFiles) -> None:
    """Raises InputError where a baseline's model has another architecture or width, by the config alone. where: the
    baseline, for the error."""
    if not may_be_of(model, files):
        was, now = (f"{m.model_type} of width {m.hidden_size}" for m in (model, identity(files)))
        raise InputError(f"{where}: belongs to another model, {clean(was)}; this one is {clean(now)}")


def refuse_other_model(
    found: BaselineFile, files: CheckpointFiles, weights: WeightFacts, metrics: Mapping[str, Value]
) -> None:
    """Raises InputError for another architecture or width, or for weights unrelated to the baseline's."""
    where, old = found.where, found.content
    refuse_other_type(where, old.model, files)
    angles, reshaped = [], _reshaped(old, {name: list(t.entry.shape) for name, t in weights.matrices.items()})
    for name in weights.matrices:
        if tensor_key(name) in reshaped:
            continue
        before, now_here = old.metrics.get(tensor_key(name)), metrics.get(tensor_key(name))
        if isinstance(before, list) and isinstance(now_here, list) and before[0] and now_here[0]:
            angles.append(distance(now_here, before) * before[0] / math.hypot(before[0], now_here[0]))
    alike = any(angle < _RELATED for angle in angles)
    if angles and not alike and math.hypot(*angles) > _FOREIGN * math.sqrt(len(angles)):
        raise InputError(
            f"{where}: belongs to another model, or this one's weights are lost: its tensors and this checkpoint's "
            "have nothing in common; give the model's own baseline, or fetch the checkpoint again"
        )

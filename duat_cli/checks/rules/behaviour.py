"""Rules about the model's answers to the prompts: its loss, its logits, and its answers against the baseline's."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.checks.policy import Level
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import needed
from duat_cli.results.behaviour import CLASSES, NOT_FINITE, Behaviour
from duat_cli.text import plural

FEW = 32
"""Number of tokens below which a loss is too uncertain to fail a check."""
MUCH = 1.0
"""Nats per token that an adapter may add to the loss: tokens become less likely by a factor of e."""
_ANSWERS_SO = (
    "Another checkpoint, or a damaged one, answers so; if the change is meant, run again with --update-baseline; with "
    "--base, let a policy allow it."
)


def _loss(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Compares the loss with the policy's `max`, the uniform distribution, and the prompts' unigram, which warns."""
    found, where = needed(evidence.behaviour), "behaviour.loss_per_token"
    if found.loss_per_token is None:  # a prompt of one token has no loss
        text = f"the loss has no value: {found.reasons['loss_per_token']}"
        yield Measurement(0.0, text, where=where, undefined="fail" if found.scored else "skip")
        return
    loss, what = found.loss_per_token, "pseudo-loss" if found.predicts == "masked token" else "loss"
    over_all, own = needed(found.uniform), needed(found.unigram)
    few = f" (on {plural(found.scored, 'token')}: too few to be sure)" if found.scored < FEW else ""
    text = f"{what} {loss:.3g} nats per token"
    uniform = f"no better than the uniform distribution over {found.vocabulary:,} tokens: {over_all:.3g}"
    unigram = f"no better than the prompts' own unigram distribution: {own:.3g}"
    level: Level | None = "warn" if few else None
    if settings.max is not None:
        yield Measurement(loss, f"{text}, at most {settings.max:g} is allowed", where=where, high=settings.max)
    if loss >= over_all:
        yield Measurement(loss, f"{text}, {uniform}{few}", where=where, high=_below(over_all), level=level)
    elif loss >= own:
        yield Measurement(loss, f"{text}, {unigram}{few}", where=where, high=_below(own), level="warn")
    else:
        best = f"{text}; uniform {over_all:.3g}, the prompts' own unigram {own:.3g}"
        yield Measurement(loss, best, where=where, high=min(over_all, own))


def _below(null: float) -> float:
    """A bound just below a null, so that a loss equal to it is a finding."""
    return null * (1 - 1e-12)


def _logits(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    found = needed(evidence.behaviour)
    count = needed(found.nonfinite_logits)
    text = f"{plural(count, 'logit')} of {plural(found.predictions, 'prediction')} are NaN or infinite"
    yield Measurement(count, text if count else _spread(found), where="behaviour.nonfinite_logits")


def _spread(found: Behaviour) -> str:
    unit, what = ("", "classes") if found.predicts in CLASSES else (" per token", "vocabulary")
    return (
        f"logits up to {found.largest_logit:.3g}, range {found.logit_range:.3g}, entropy {found.entropy:.3g} nats"
        f"{unit}; {needed(found.never_predicted):.1%} of the {what} never likelier than 1/{found.vocabulary}"
    )


def _agreement(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Compares the answers' distance from the baseline's with the policy's `max`, else with rounding of the dtype."""
    found, where = needed(evidence.agreement), "behaviour.agreement"
    key, turned = (evidence.baseline_file, "answers"), found.embeddings
    for one, field in ((found, where), (turned, "behaviour.cosine")):
        if one is not None:
            limit, source = (one.allowed, "rounding of the dtype") if settings.max is None else (settings.max, None)
            yield Measurement(one.distance, one.text, where=field, high=limit, source=source, key=key)


def _divergence(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Compares the KL of a classifier's classes with the policy's `max`, else with the rounding of the dtype."""
    found, where, key = needed(evidence.agreement), "behaviour.kl", (evidence.baseline_file, "answers")
    if found.kl is None:
        yield Measurement(0.0, found.without, where=where, undefined="fail" if found.without == NOT_FINITE else "skip")
        return
    limit, source = (found.kl_allowed, "rounding of the dtype") if settings.max is None else (settings.max, None)
    text = f"the classes' distributions are {found.kl:.3g} nats from the baseline's, mean over the predictions (KL)"
    yield Measurement(found.kl, text, where=where, high=limit, source=source, key=key)


def _tuned(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Compares the loss with the adapter. No better than uniform, where the base is better, has the rule's level; much
    worse than the base only warns, and so does a tuned model that cannot be run."""
    found = needed(evidence.behaviour)
    where, key = "behaviour.tuned.loss_per_token", (evidence.adapter_file, "")
    with_it = needed(found.tuned)
    tuned = with_it.loss_per_token
    if tuned is None:
        why = with_it.reasons["loss_per_token"]
        level: Level | None = None if why == NOT_FINITE else "warn"
        text = f"the loss with the adapter has no value: {why}"
        yield Measurement(0.0, text, where=where, level=level, undefined="fail", key=key)
        return
    base, uniform = needed(found.loss_per_token), needed(found.uniform)
    text = f"with the adapter the loss is {tuned:.3g} nats per token, without {base:.3g}"
    if tuned >= uniform > base and found.scored >= FEW:
        null = f"no better than the uniform distribution over {found.vocabulary:,} tokens: {uniform:.3g}"
        yield Measurement(tuned - base, f"{text}, {null}", where=where, high=0.0, key=key)
    else:
        yield Measurement(tuned - base, text, where=where, level="warn", key=key)


RULES = [
    Rule(
        "behaviour.loss",
        "loss on the prompts: no better than the uniform distribution an error, than their own unigram a warning",
        "Look for weights in the wrong place: permuted rows, swapped or transposed matrices, a head of another model.",
        _loss,
        ("behaviour", "predictions"),
        max=None,
        unit="nats per token",
    ),
    Rule(
        "behaviour.logits",
        "logits on the prompts that are NaN or infinite; their range and entropy are in the report",
        "Run with --dtype float32; if they stay, the head's weights are damaged.",
        _logits,
        ("behaviour", "predictions"),
        unit="logits",
    ),
    Rule(
        "behaviour.agreement",
        "predictions unlike the baseline's: share of tokens or classes that changed, or of embeddings 1 - cosine",
        _ANSWERS_SO,
        _agreement,
        ("behaviour", "baseline", "answers"),
        max=None,
        unit="share",
    ),
    Rule(
        "behaviour.kl",
        "a classifier's distributions over its classes unlike the baseline's: mean KL",
        _ANSWERS_SO,
        _divergence,
        ("behaviour", "baseline", "answers"),
        max=None,
        unit="nats",
    ),
    Rule(
        "adapter.behaviour",
        "what the adapter adds to the loss on the prompts, or why the tuned model cannot be run; an error where it is "
        "no better than uniform",
        "Check that the adapter belongs to this base, its scaling, and that its training had not diverged.",
        _tuned,
        ("adapter", "behaviour", "predictions", "tuned"),
        max=MUCH,
        unit="nats per token",
    ),
]

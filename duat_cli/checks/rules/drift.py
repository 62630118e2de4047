"""Rules about drift: every metric is compared with the baseline, by one rule for each group of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from duat_cli.checks.baseline import metric_of
from duat_cli.checks.drift import Deviation
from duat_cli.checks.rule import Evidence, Measurement, Need, Rule, Settings
from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.text import apart, listed, plural, shown

_UPDATE = (
    "If the change is meant, run again with --update-baseline and commit the baseline; with --base, let a policy allow "
    "it."
)
_FINE_TUNE = "A fine-tune of the baseline's model? --policy fine-tune lets weights move, and behaviour only so far. "
_UNRUN = "--update-baseline without --weights-only adds the forward pass."
_TUNED = "`duat lora-diff BASE TUNED` says what a fine-tune changed."


def _moved(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    own = [d for d in evidence.drift or () if metric_of(d.key).rule == settings.rule.id]
    advice = _TUNED if settings.rule.id == "drift.weights" and settings.level == "warn" else None
    both = [_measurement(d, evidence.baseline_file) for d in own if d.status in ("within", "beyond")]
    yield from (replace(one, advice=advice) for one in both)
    if not own and evidence.retokenised:
        yield Measurement(0.0, evidence.retokenised, undefined="skip")
    elif all(d.status in ("vanished", "new") for d in own):
        one = "this run" if any(d.status == "vanished" for d in own) else "the baseline"
        yield Measurement(0.0, f"{one} has none of these metrics", undefined="skip")


def _measurement(deviation: Deviation, file: str) -> Measurement:
    limit, key, metric = needed(deviation.tolerance), deviation.key, metric_of(deviation.key)
    empty = Measurement(0.0, "", metric.block, key, source=limit.source, key=(file, key))
    if deviation.reason is not None:
        text = f"{shown(metric.name)} has another shape, {deviation.reason}; a distance is not defined"
        return replace(empty, text=text, undefined="fail")
    if isinstance(deviation.new, list):
        text = f"{shown(metric.name)} moved by about {deviation.change:.2g} of its norm"
        return replace(empty, value=deviation.change, text=text, high=limit.atol + limit.rtol)
    old, new = deviation.old, deviation.new
    assert isinstance(old, float | int)
    assert isinstance(new, float | int)
    low, high = limit.ends(old, deviation.slack)
    text = f"{shown(key)} went from {apart(old, new)} to {apart(new, old)}"
    source = f"{limit.source} and the width of its interval" if deviation.slack else limit.source
    return replace(empty, value=new, text=text, low=low, high=high, source=source)


def _vanished(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    gone = (one for one in evidence.drift or () if one.status == "vanished")
    for block, found in by_key((metric_of(one.key).block, one) for one in gone).items():
        keys = [d.key for d in found]
        why = next((f" ({d.reason})" for d in found if d.reason), "")
        text = f"{plural(len(keys), 'metric')} disappeared: {listed(keys)}{why}"
        yield Measurement(len(keys), text, block, keys[0], key=(evidence.baseline_file, keys[0]))


def _new(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Metrics that the baseline lacks. A tensor among them is grave unless it copies another (a tied output matrix)."""
    every = [one for one in evidence.drift or () if one.status == "new"]
    passes = [one for one in evidence.drift or () if metric_of(one.key).kind == "field"]
    if passes and all(one.status == "new" for one in passes):  # a baseline with a forward pass has some of them
        every = [one for one in every if one not in passes]
        text = f"the baseline was made with --weights-only: {plural(len(passes), 'number')} of the forward pass are new"
        yield Measurement(len(passes), text, key=(evidence.baseline_file, ""), advice=_UNRUN)

    def where(key: str) -> tuple[int | None, bool]:
        metric = metric_of(key)
        return metric.block, metric.kind == "tensor" and not _is_copy(evidence, metric.name)

    for (block, grave), keys in by_key((where(one.key), one.key) for one in every).items():
        what = "tensor" if grave else "metric"
        text = f"{plural(len(keys), what)} that the baseline lacks: {listed(keys)}"
        yield Measurement(len(keys), text, block, keys[0], key=(evidence.baseline_file, ""), grave=grave)


def _is_copy(evidence: Evidence, name: str) -> bool:
    one = evidence.weights.matrices.get(name)
    others = (other for own, other in evidence.weights.tensors.items() if own != name)
    return (
        one is not None
        and not one.zero
        and any(other.entry.shape == one.entry.shape and one.copies(other) for other in others)
    )


def _stale(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    for d in evidence.drift or ():
        if d.status == "better":
            assert isinstance(d.old, float | int)
            assert isinstance(d.new, float | int)
            text = f"{shown(d.key)} improved from {apart(d.old, d.new)} to {apart(d.new, d.old)}: the baseline is stale"
            yield Measurement(1, text, metric_of(d.key).block, d.key, key=(evidence.baseline_file, d.key))


def _rule(name: str, about: str, unit: str, *needs: Need) -> Rule:
    advice = f"{_FINE_TUNE}{_UPDATE}" if name == "drift.weights" else _UPDATE
    return Rule(name, about, advice, _moved, ("baseline", *needs), max=None, unit=unit)


RULES = [
    _rule("drift.weights", "relative distance of every tensor from the baseline's, from its sketch", "relative"),
    _rule("drift.integrity", "counts of what is broken in the weights, against the baseline's", "count"),
    _rule(
        "drift.behaviour", "loss, entropy and range of the model's predictions against the baseline's", "", "behaviour"
    ),
    _rule("drift.operator", "norm, effective heads and block correlation of W' against the baseline's", "", "report"),
    _rule("drift.density", "density of W' against the baseline's", "share", "report"),
    _rule("drift.coupling", "coupling of tokens through W' against the baseline's", "", "report"),
    _rule("drift.terms", "shares and norms of the UAT sum at every block against the baseline's", "", "report"),
    _rule("drift.summary", "means of the inspect report's summary against the baseline's", "", "report"),
    Rule(
        "drift.vanished",
        "metrics of the baseline that this run lacks",
        "Find out why the metric has no value any more; only then run with --update-baseline, or, with --base, let a "
        "policy allow it.",
        _vanished,
        ("baseline",),
        unit="metrics",
    ),
    Rule(
        "drift.new",
        "metrics that the baseline lacks; a tensor that is no copy of another is an error",
        "Find out where a tensor comes from; once it is meant, --update-baseline has it watched; with --base, let a "
        "policy allow it.",
        _new,
        ("baseline",),
        level="warn",
        unit="metrics",
    ),
    Rule(
        "drift.stale",
        "metrics that improved against the baseline's by more than their tolerance",
        "Run with --update-baseline, so that the improvement is kept; with --base there is nothing to keep.",
        _stale,
        ("baseline",),
        level="warn",
        unit="metrics",
    ),
]

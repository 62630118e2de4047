"""Judgement of measurements against their bounds, which gives outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from duat_cli.checks.rule import Evidence, Measurement, Settings
from duat_cli.results.base import finite
from duat_cli.results.check import Location, Outcome
from duat_cli.text import plural

Locate = Callable[[tuple[str, str] | None, str | None], Location]
"""The location of a key in a baseline or a policy, as in `Measurement`, and of a place in the checkpoint."""


def judge(settings: Settings, evidence: Evidence, locate: Locate) -> Iterator[Outcome]:
    """Yields one outcome per finding; for a rule without findings one, about the measurement nearest to its bound; and
    one for all measurements of which nothing is known."""
    why = next((evidence.absent[need] for need in settings.rule.needs if need in evidence.absent), None)
    if why is not None:
        yield _quiet(settings, "skipped", why, locate)
        return
    # a measurement without a bound of its own has the rule's
    measured = [
        replace(m, high=settings.max) if m.low is None and m.high is None else m
        for m in settings.rule.measure(evidence, settings)
    ]
    unknown = [m for m in measured if m.undefined == "skip"]
    known = [m for m in measured if m.undefined != "skip"]
    failing = [m for m in known if m.fails]
    for found in sorted(failing, key=lambda m: -abs(m.tightness)):
        yield _outcome(settings, found, locate)
    if not failing and (known or not unknown):
        yield _passed(settings, known, locate)
    if unknown:
        more = f"; {len(unknown) - 1} more without a value" if len(unknown) > 1 else ""
        yield _quiet(settings, "skipped", f"{unknown[0].text}{more}", locate, unknown[0])


def _outcome(settings: Settings, measurement: Measurement, locate: Locate) -> Outcome:
    level = measurement.level or settings.level
    if settings.level == "warn" or level == "off":
        level = "warn"
    if measurement.grave and settings.key is None:
        level = "error"
    value = None if measurement.undefined else finite(measurement.value)
    beyond = None if measurement.undefined else finite(measurement.beyond)
    reasons = {}
    if value is None:
        reasons["measured"] = "it has no value" if measurement.undefined else f"it is {measurement.value}"
    if beyond is None:
        reasons["beyond"] = reasons.get("measured", "it is infinite")
    return Outcome(
        rule=settings.rule.id,
        level="error" if level == "error" else "warn",
        status="failed" if level == "error" else "warned",
        block=measurement.block,
        where=measurement.where,
        measured=value,
        low=measurement.low,
        high=measurement.high,
        beyond=beyond,
        unit=settings.rule.unit,
        message=measurement.text,
        advice=settings.rule.advice if measurement.advice is None else measurement.advice,
        source=_source(settings, measurement),
        location=locate(measurement.key or settings.key, measurement.where),
        reasons=reasons,
    )


def _passed(settings: Settings, found: list[Measurement], locate: Locate) -> Outcome:
    if not found:
        none = None if settings.max is None else 0.0
        return _quiet(settings, "passed", f"none found: {settings.rule.about}", locate, None, none)
    defined = [m for m in found if not m.undefined]
    nearest = max(defined or found, key=lambda m: m.tightness)
    text = nearest.text
    if nearest.undefined != "pass" and settings.rule.id.startswith("drift."):
        text = _closest(len(found), nearest)
    elif len(found) > 1:
        text = f"{len(found)} looked at; nearest to its bound: {text}"
    return _quiet(settings, "passed", text, locate, nearest, finite(nearest.value) if defined else None)


def _closest(count: int, nearest: Measurement) -> str:
    """The text on the metric that came closest to its tolerance, and how close it came."""
    metrics = plural(count, "metric")
    if nearest.tightness == 0:
        return f"{metrics}, none moved"
    if nearest.tightness < 0.01:
        return f"{metrics}, none moved by 1% of its tolerance"
    return f"{metrics}; closest to its tolerance, at {nearest.tightness:.0%} of it: {nearest.text}"


def _quiet(
    settings: Settings,
    status: Literal["passed", "skipped"],
    message: str,
    locate: Locate,
    nearest: Measurement | None = None,
    measured: float | None = None,
) -> Outcome:
    """The outcome of a rule without findings. nearest: the measurement that it is about, if there is one."""
    reasons = dict.fromkeys(("measured", "beyond"), message)
    if status == "passed":
        reasons = {"beyond": "it passed"} | ({} if measured is not None else {"measured": "nothing to measure"})
    return Outcome(
        rule=settings.rule.id,
        level="error" if settings.level == "error" else "warn",
        status=status,
        block=None,
        where=nearest.where if nearest else None,
        measured=measured,
        low=nearest.low if nearest else None,
        high=nearest.high if nearest else settings.max,
        beyond=None,
        unit=settings.rule.unit,
        message=message,
        advice=None,
        source=_source(settings, nearest),
        location=locate(settings.key, None),
        reasons=reasons,
    )


def _source(settings: Settings, measurement: Measurement | None) -> str:
    if measurement is not None and measurement.source:
        return measurement.source
    if settings.level_source == settings.max_source:
        return settings.max_source
    return f"{settings.max_source}; level: {settings.level_source}"

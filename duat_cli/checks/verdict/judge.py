"""Measurements against their bounds: outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from duat_cli.checks.rule import Evidence, Measurement, Settings
from duat_cli.results.check import Location, Outcome
from duat_cli.text import plural

Locate = Callable[[tuple[str, str] | None, str | None], Location]
"""Of a key in a baseline or a policy, as of `Measurement`, and of where in the checkpoint."""


@dataclass(frozen=True)
class _Judged:
    measurement: Measurement
    low: float | None
    high: float | None

    @property
    def beyond(self) -> float:
        """How far outside; at most 0 where it passes. NaN counts as outside."""
        value = self.measurement.value
        sides = [
            *([value - self.high] if self.high is not None else []),
            *([self.low - value] if self.low is not None else []),
        ]
        worst = max(sides, default=-math.inf)
        return math.inf if math.isnan(value) or any(map(math.isnan, sides)) else worst

    @property
    def tightness(self) -> float:
        """How much of the room is used: 1 at the bound, whatever the unit."""
        if self.low is not None and self.high is not None:
            half = (self.high - self.low) / 2
            return abs(self.measurement.value - self.low - half) / half if half else 0.0
        if self.high is not None:
            return self.measurement.value / self.high if self.high else self.measurement.value
        return 0.0 if self.low is None else -self.measurement.value

    @property
    def fails(self) -> bool:
        return self.measurement.undefined == "fail" or (not self.measurement.undefined and self.beyond > 0)


def judge(settings: Settings, evidence: Evidence, locate: Locate) -> Iterator[Outcome]:
    """One outcome a finding; one for a rule without findings, about the measurement nearest to its bound; and one for
    all of which nothing is known."""
    why = next((evidence.absent[need] for need in settings.rule.needs if need in evidence.absent), None)
    if why is not None:
        yield _quiet(settings, "skipped", why, None, {"measured": why, "beyond": why}, locate, None)
        return
    judged = [_judged(m, settings) for m in settings.rule.measure(evidence, settings)]
    unknown = [j for j in judged if j.measurement.undefined == "skip"]
    known = [j for j in judged if j.measurement.undefined != "skip"]
    failing = [j for j in known if j.fails]
    for found in sorted(failing, key=lambda j: -abs(j.tightness)):
        yield _outcome(settings, found, locate)
    if not failing and (known or not unknown):
        yield _passed(settings, known, locate)
    if unknown:
        more = f"; {len(unknown) - 1} more without a value" if len(unknown) > 1 else ""
        why = f"{unknown[0].measurement.text}{more}"
        yield _quiet(settings, "skipped", why, None, {"measured": why, "beyond": why}, locate, unknown[0])


def _judged(measurement: Measurement, settings: Settings) -> _Judged:
    if measurement.low is not None or measurement.high is not None:
        return _Judged(measurement, measurement.low, measurement.high)
    return _Judged(measurement, None, settings.max)


def _outcome(settings: Settings, found: _Judged, locate: Locate) -> Outcome:
    measurement = found.measurement
    level = measurement.level or settings.level
    if settings.level == "warn" or level == "off":
        level = "warn"
    if measurement.grave and settings.key is None:
        level = "error"
    value = None if measurement.undefined else _finite(measurement.value)
    beyond = None if measurement.undefined else _finite(found.beyond)
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
        low=found.low,
        high=found.high,
        beyond=beyond,
        unit=settings.rule.unit,
        message=measurement.text,
        advice=settings.rule.advice,
        source=_source(settings, measurement),
        location=locate(measurement.key or settings.key, measurement.where),
        reasons=reasons,
    )


def _passed(settings: Settings, judged: list[_Judged], locate: Locate) -> Outcome:
    defined = [j for j in judged if not j.measurement.undefined]
    nearest = max(defined or judged, key=lambda j: j.tightness, default=None)
    text = settings.rule.about if nearest is None else nearest.measurement.text
    none = 0.0 if settings.max is not None else None
    measured = _finite(nearest.measurement.value) if nearest and defined else (none if not judged else None)
    if nearest is not None and nearest.measurement.undefined != "pass" and settings.rule.id.startswith("drift."):
        text = _closest(len(judged), nearest)
    elif len(judged) > 1:
        text = f"{len(judged)} looked at; nearest to its bound: {text}"
    message = text if nearest else f"none found: {text}"
    reasons = {"beyond": "it passed"} | ({} if measured is not None else {"measured": "nothing to measure"})
    return _quiet(settings, "passed", message, measured, reasons, locate, nearest)


def _closest(count: int, nearest: _Judged) -> str:
    """Which metric came closest to its tolerance, and how close."""
    metrics = plural(count, "metric")
    if nearest.tightness == 0:
        return f"{metrics}, none moved"
    used = f"{nearest.tightness:.0%}" if nearest.tightness >= 0.01 else "less than 1%"
    return f"{metrics}; closest to its tolerance, at {used} of it: {nearest.measurement.text}"


def _quiet(
    settings: Settings,
    status: Literal["passed", "skipped"],
    message: str,
    measured: float | None,
    reasons: dict[str, str],
    locate: Locate,
    nearest: _Judged | None,
) -> Outcome:
    """Of a rule without findings. nearest: the measurement that it is about, if there is one."""
    return Outcome(
        rule=settings.rule.id,
        level="error" if settings.level == "error" else "warn",
        status=status,
        block=None,
        where=None if nearest is None else nearest.measurement.where,
        measured=measured,
        low=nearest.low if nearest else None,
        high=nearest.high if nearest else settings.max,
        beyond=None,
        unit=settings.rule.unit,
        message=message,
        advice=None,
        source=_source(settings, nearest.measurement if nearest else None),
        location=locate(settings.key, None),
        reasons=reasons,
    )


def _source(settings: Settings, measurement: Measurement | None) -> str:
    if measurement is not None and measurement.source:
        return measurement.source
    if settings.level_source == settings.max_source:
        return settings.max_source
    return f"{settings.max_source}; level: {settings.level_source}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None

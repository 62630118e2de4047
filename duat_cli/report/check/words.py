"""What every form of `duat check` says in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.report.tables import facts
from duat_cli.results.check import BaselineFacts, Cause, CheckReport, Outcome
from duat_cli.results.prompts import all_prompts
from duat_cli.text import plural


def verdict(report: CheckReport) -> str:
    """FAILED: 2 failed, 1 warning, 19 passed, 3 skipped."""
    count = report.counts
    parts = [f"{count.failed} failed"] if count.failed else []
    parts += [plural(count.warned, "warning")] if count.warned else []
    parts += [f"{count.passed} passed"]
    parts += [f"{count.skipped} skipped"] if count.skipped else []
    behind = sum(len(cause.effects) for cause in report.causes)
    causes = plural(sum(bool(cause.effects) for cause in report.causes), "cause")
    folded = f"; {behind} of these behind {causes}" if behind else ""
    return f"{report.verdict.upper()}: {', '.join(parts)}{folded}"


def looked_at(report: CheckReport) -> list[str]:
    """The files, what ran on them, and by which policy."""
    ran = facts.ran(all_prompts(report), report.environment) if report.environment else "weights only"
    files = facts.files(report.model) + facts.quantised(report.model.quantised)
    return [files, ran, f"policy: {', then '.join(report.policy)}"]


def against(baseline: BaselineFacts) -> str:
    """baseline duat-baseline.json: compared, 56 of 229 metrics."""
    of = "" if baseline.compared is None else f"{baseline.compared} of "
    name = f"{'base' if baseline.base else 'baseline'} {baseline.file}"
    return f"{name}: {baseline.status}, {of}{plural(baseline.entries, 'metric')}"


def measured(outcome: Outcome) -> str:
    """0.35 > 0.0001: what was measured, and the bound it breaks or keeps."""
    if outcome.measured is None:
        return ""
    value, low, high = outcome.measured, outcome.low, outcome.high
    if outcome.beyond is None:
        bounds = [f"{sign} {number(limit)}" for sign, limit in ((">=", low), ("<=", high)) if limit is not None]
        said = f"{number(value)} {outcome.unit}".rstrip()
        return f"{said} ({' and '.join(bounds)})" if bounds else said
    if high is not None and value > high:
        return f"{number(value)} > {number(high)}"
    return f"{number(value)} < {number(low)}" if low is not None and value < low else number(value)


def number(value: float | None, digits: int = 6) -> str:
    """Enough digits to tell a value from its bound."""
    return "" if value is None else f"{value:.{digits}g}"


def without_findings(outcome: Outcome) -> str:
    """What a rule that passed measured, or why it was skipped; of a drift rule what came closest."""
    named = outcome.rule.startswith("drift.") or outcome.rule == "bounds"  # many fields: the message says which
    return (named and outcome.message) or measured(outcome) or outcome.message


def own(report: CheckReport, cause: Cause) -> list[Outcome]:
    """The cause's own findings, the first in depth first."""
    return [report.outcomes[at] for at in cause.findings]


def effects(report: CheckReport, cause: Cause) -> list[Outcome]:
    """What follows from the cause, the farthest first."""
    return [report.outcomes[at] for at in cause.effects]


def where(cause: Cause) -> str | None:
    """The block that it begins in, or else its place."""
    return cause.where if cause.block is None else f"block {cause.block}"


def heading(cause: Cause) -> str:
    """failed drift.weights, 24 findings."""
    many = f", {len(cause.findings)} findings" if len(cause.findings) > 1 else ""
    return f"{cause.status} {', '.join(cause.rules)}{many}"


def summary(cause: Cause, found: list[Outcome]) -> str:
    """What was found, with its number where it is one; and how much follows from it."""
    text = f"{cause.message} {limit(found[0])}" if len(found) == 1 else cause.message
    return f"{text}; {cause.folded}" if cause.folded else text


def limit(outcome: Outcome) -> str:
    """[0.35 > 0.0001; tolerance of float32]."""
    return f"[{measured(outcome)}; {outcome.source}]" if outcome.measured is not None else f"[{outcome.source}]"


def advice(found: Iterable[Outcome]) -> list[str]:
    """What to do, each sentence once."""
    return list(dict.fromkeys(outcome.advice for outcome in found if outcome.advice))


def told(cause: Cause, found: list[Outcome]) -> str:
    """Everything about a cause in one line."""
    return ". ".join([summary(cause, found), " ".join(advice(found))]).rstrip(". ") + "."


def sentence(outcome: Outcome) -> str:
    """Everything about a finding in one line."""
    return f"{outcome.message} {limit(outcome)}{f'. {outcome.advice}' if outcome.advice else ''}"

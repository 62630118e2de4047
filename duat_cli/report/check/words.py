"""Words that all forms of `duat check` share."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.grouping import by_key
from duat_cli.report.tables import facts
from duat_cli.results.check import BaselineFacts, Cause, CheckReport, Outcome
from duat_cli.results.prompts import all_prompts
from duat_cli.text import apart, plural

_ESTIMATED = {"drift.weights": 0.25}
"""Rules whose numbers are estimates, with the standard error as a share: a quarter for a distance from a sketch."""


def verdict(report: CheckReport) -> str:
    """The verdict, as in: FAILED: 1 cause (24 findings, 128 behind it), 1 warning, 19 passed, 3 skipped."""
    count = report.counts
    parts = [_counted(report, "failed", "cause"), _counted(report, "warned", "warning"), f"{count.passed} passed"]
    parts += [f"{count.skipped} skipped"] if count.skipped else []
    return f"{report.verdict.upper()}: {', '.join(filter(None, parts))}"


def _counted(report: CheckReport, status: str, noun: str) -> str:
    """How many causes have a status, with the number of their findings, if larger, and of their effects."""
    causes = [cause for cause in report.causes if cause.status == status]
    found, behind = sum(len(cause.findings) for cause in causes), sum(len(cause.effects) for cause in causes)
    more = [plural(found, "finding")] if found > len(causes) else []
    more += [f"{behind} behind {'it' if len(causes) == 1 else 'them'}"] if behind else []
    text = f"{plural(len(causes), noun)} ({', '.join(more)})" if more else plural(len(causes), noun)
    return text if causes else ""


def policies(report: CheckReport) -> str:
    """Sources of the policy, as in: default, then my.toml; 1 rule turned off, by it or by --select."""
    off = f"; {plural(len(report.off), 'rule')} turned off, by it or by --select" if report.off else ""
    return ", then ".join(source.removeprefix("policy ") for source in report.policy) + off


def looked_at(report: CheckReport) -> list[str]:
    """Lines on the files, what ran on them, and the policy."""
    ran = facts.ran(all_prompts(report), report.environment) if report.environment else "weights only"
    files = facts.files(report.model) + facts.quantised(report.model.quantised)
    return [files, ran, f"policy: {policies(report)}"]


def against(baseline: BaselineFacts) -> str:
    """The baseline, as in: baseline duat-baseline.json: compared, 56 of 229 metrics."""
    of = "" if baseline.compared is None else f"{baseline.compared} of "
    name = f"{'base' if baseline.base else 'baseline'} {baseline.file}"
    return f"{name}: {baseline.status}, {of}{plural(baseline.entries, 'metric')}"


def measured(outcome: Outcome) -> str:
    """The measured value and the bound that it breaks or keeps, as in: 0.35 > 0.0001; for an estimate: about 0.35 +-
    0.09; at most 0.0001."""
    if outcome.measured is None:
        return ""
    value, low, high = outcome.measured, outcome.low, outcome.high
    said = reading(outcome)
    least, most = (number(limit, value) for limit in (low, high))
    if outcome.beyond is None:
        bounds = [f"{sign} {limit}" for sign, limit in ((">=", least), ("<=", most)) if limit]
        said = f"{said} {outcome.unit}".rstrip()
        return f"{said} ({' and '.join(bounds)})" if bounds else said
    if high is not None and value > high:
        return f"{said}; at most {most}" if outcome.rule in _ESTIMATED else f"{said} > {most}"
    return f"{said} < {least}" if low is not None and value < low else said


def reading(outcome: Outcome) -> str:
    """The measured value, with its standard error if it is an estimate; empty without a value."""
    value, error = outcome.measured, _ESTIMATED.get(outcome.rule)
    if not value or error is None:
        return number(value, outcome.low, outcome.high)
    return f"about {value:.2g} +- {error * value:.1g}" if value < 0.1 else f"about {value:.2f} +- {error * value:.2f}"


def number(value: float | None, *others: float | None) -> str:
    """The value, with enough digits to tell it from its bounds."""
    return "" if value is None else apart(value, *(other for other in others if other is not None))


def without_findings(outcome: Outcome) -> str:
    """The value of a rule that passed, or why it was skipped; for a drift rule, the value closest to its bound."""
    named = outcome.rule.startswith("drift.") or outcome.rule == "bounds"  # many fields: the message says which
    return (named and outcome.message) or measured(outcome) or outcome.message


def unmeasured(report: CheckReport) -> dict[str, list[str]]:
    """Reasons for skipped rules -> names of the rules; a family with the same reason for every rule is 'adapter.*'."""
    skipped = by_key((o.message, o.rule) for o in report.outcomes if o.status == "skipped")
    return {why: whole(rules, report, "skipped") for why, rules in skipped.items()}


def whole(rules: list[str], report: CheckReport, status: str) -> list[str]:
    """Names of the rules; a family of which no other rule is in the report is 'adapter.*'. status: of these rules."""
    others = {o.rule.partition(".")[0] for o in report.outcomes if o.rule not in rules or o.status != status}
    families = [(rule, rule.partition(".")[0]) for rule in rules]
    return list(dict.fromkeys(rule if family in others else f"{family}.*" for rule, family in families))


def own(report: CheckReport, cause: Cause) -> list[Outcome]:
    """The cause's own findings, in order of depth."""
    return [report.outcomes[at] for at in cause.findings]


def effects(report: CheckReport, cause: Cause) -> list[Outcome]:
    """The findings that follow from the cause, the farthest beyond its bound first."""
    return [report.outcomes[at] for at in cause.effects]


def where(cause: Cause) -> str | None:
    """The block in which a cause begins or, without one, its place."""
    return cause.where if cause.block is None else f"block {cause.block}"


def heading(cause: Cause) -> str:
    """Heading of a cause, as in: failed drift.weights, 24 findings."""
    many = f", {len(cause.findings)} findings" if len(cause.findings) > 1 else ""
    return f"{cause.status} {', '.join(cause.rules)}{many}"


def summary(cause: Cause, found: list[Outcome]) -> str:
    """The finding of a cause, with its value if it is a single one; and how much follows from it."""
    text = f"{cause.message} {limit(found[0])}" if len(found) == 1 else cause.message
    return f"{text}; {cause.folded}" if cause.folded else text


def limit(outcome: Outcome) -> str:
    """Value, bound and source in brackets, as in: [0.35 > 0.0001; tolerance of float32]."""
    return f"[{measured(outcome)}; {outcome.source}]" if outcome.measured is not None else f"[{outcome.source}]"


def advice(found: Iterable[Outcome]) -> list[str]:
    """The advice, each sentence once."""
    return list(dict.fromkeys(outcome.advice for outcome in found if outcome.advice))


def told(cause: Cause, found: list[Outcome]) -> str:
    """Everything about a cause in one line."""
    return ". ".join([summary(cause, found), " ".join(advice(found))]).rstrip(". ") + "."


def sentence(outcome: Outcome) -> str:
    """Everything about a finding in one line."""
    return f"{outcome.message} {limit(outcome)}{f'. {outcome.advice}' if outcome.advice else ''}"

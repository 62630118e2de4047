"""What every form of `duat check` says in the same words."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.results.check import CheckReport, Outcome


def verdict(report: CheckReport) -> str:
    """FAILED: 2 failed, 1 warning, 19 passed, 3 skipped."""
    count = report.counts
    parts = [f"{count.failed} failed"] if count.failed else []
    parts += [numbers.plural(count.warned, "warning")] if count.warned else []
    parts += [f"{count.passed} passed"]
    parts += [f"{count.skipped} skipped"] if count.skipped else []
    return f"{report.verdict.upper()}: {', '.join(parts)}"


def place(outcome: Outcome) -> str:
    """block 3, or what else the outcome is about; '' for the whole checkpoint."""
    return f"block {outcome.block}" if outcome.block is not None else outcome.where or ""


def measured(outcome: Outcome) -> str:
    """0.35 > 0.0001: what was measured, and the bound it breaks or keeps."""
    if outcome.measured is None:
        return ""
    value, low, high = outcome.measured, outcome.low, outcome.high
    if outcome.beyond is None:
        bounds = [f"{sign} {number(limit)}" for sign, limit in ((">=", low), ("<=", high)) if limit is not None]
        return f"{number(value)} ({' and '.join(bounds)})" if bounds else number(value)
    if high is not None and value > high:
        return f"{number(value)} > {number(high)}"
    return f"{number(value)} < {number(low)}" if low is not None and value < low else number(value)


def number(value: float | None, digits: int = 6) -> str:
    """Enough digits to tell a value from its bound."""
    return "" if value is None else f"{value:.{digits}g}"


def findings(report: CheckReport) -> list[Outcome]:
    """What failed, then what warned; within a rule the farthest first."""
    return [o for status in ("failed", "warned") for o in report.outcomes if o.status == status]


def sentence(outcome: Outcome) -> str:
    """Everything about a finding in one line."""
    limit = f" [{measured(outcome)}; {outcome.source}]" if outcome.measured is not None else f" [{outcome.source}]"
    return f"{outcome.message}{limit}{f'. {outcome.advice}' if outcome.advice else ''}"

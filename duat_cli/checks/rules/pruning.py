"""Pruning slack: the share of the model that can be removed within a budget. Its growth shows wasted training."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import needed


def _slack(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    slack = needed(evidence.slack)
    for plan in slack.plans:
        kind = plan.granularity
        if settings.rule.id == f"pruning.{kind}s":
            yield Measurement(
                plan.share,
                f"{plan.removed} of {plan.of} {kind}s can go together within {plan.budget:g} "
                f"{slack.protocol.unit}, {plan.share:.1%}",
                where=f"plans.{kind}.share",
            )


RULES = [
    Rule(
        f"pruning.{kind}s",
        f"share of {kind}s that can be removed together within the budget of [pruning]",
        f"See `duat prune-bound --granularity {kind}`: prune them, or find out why training left them idle.",
        _slack,
        ("slack",),
        level="off",
        max=most,
        unit="share",
    )
    for kind, most in (("neuron", 0.5), ("head", 0.25))
]

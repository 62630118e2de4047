"""The metrics of a run, to be written to a baseline or compared with one."""

from __future__ import annotations

from collections.abc import Mapping

from duat_cli.checks.baseline import ANSWERS_SCHEMA, BEHAVIOUR, SCHEMA, Value, rounded, tensor_key, weight_metrics
from duat_cli.checks.paths import flatten, place_of
from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence, Settings
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.inspect import InspectReport


def metrics_of(evidence: Evidence, schema: int = SCHEMA) -> tuple[dict[str, Value], dict[str, str]]:
    """(metric -> value, metric -> why it has none); values are rounded as in a baseline of that schema."""
    values: dict[str, Value] = weight_metrics(evidence.weights, schema)
    reasons = {tensor_key(name): f"{count} non-finite values" for name, count in evidence.weights.nonfinite.items()}
    for name, rule in all_rules().items():
        if rule.metric is not None:
            found = [m.value for m in rule.measure(evidence, Settings(rule, rule.level, rule.max, rule.allowed))]
            values[name] = max(found, default=0.0) if rule.metric == "largest" else sum(found, 0.0)
    behaviour = evidence.behaviour if schema >= ANSWERS_SCHEMA else None
    for front, report in (("", evidence.report), (f"{BEHAVIOUR}.", behaviour)):
        numbers, whys = ({}, {}) if report is None else report_metrics(report)
        values |= {front + name: value for name, value in numbers.items()}
        reasons |= {front + name: why for name, why in whys.items()}
    return {key: rounded(value) for key, value in values.items()}, reasons


def report_metrics(report: InspectReport | Behaviour) -> tuple[dict[str, float], dict[str, str]]:
    """(path -> value, path -> why it has none) for the numbers that their fields' metadata selects for drift."""
    numbers, whys = flatten(report)
    kind = type(report)
    return (
        {path: value for path, value in numbers.items() if place_of(path, kind).watched},
        {path: why for path, why in whys.items() if place_of(path, kind).watched},
    )


def sampling_slack(report: InspectReport | None) -> Mapping[str, float]:
    """Metric -> the width of its 95 % interval, for every density that was estimated."""
    if report is None:
        return {}
    found = {}
    for block in report.blocks:
        low, high = block.density.numerical_low, block.density.numerical_high
        if low is not None and high is not None:
            found[f"blocks.{block.index}.density.numerical"] = high - low
    return found

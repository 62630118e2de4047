"""Measurements against bounds that are made up: what is found, what passes, and what says nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence, Measurement, Settings
from duat_cli.checks.verdict.judge import judge
from duat_cli.results.check import Location, Outcome

HERE = Location(file="config.json", line=1)
GIVEN = Measurement(0.5, "half")
NONE: Literal["skip"] = "skip"


def judged(*measurements: Measurement, level: Literal["error", "warn"] = "error") -> list[Outcome]:
    rule = replace(all_rules()["behaviour.loss"], measure=lambda evidence, settings: measurements)
    return list(judge(Settings(rule, level, 1.0, None), Evidence(None, None), lambda key, where: HERE))  # type: ignore[arg-type]


def test_what_hardly_moved_is_not_told_in_numbers() -> None:
    rule = all_rules()["drift.operator"]
    for value, said in (
        (0.0, "none moved"),
        (0.005, "none moved by 1% of its tolerance"),
        (-0.4, "at 40% of it: text"),
    ):
        one = Measurement(value, "text", low=-1.0, high=1.0)
        settings = Settings(replace(rule, measure=lambda *_, one=one: [one], needs=()), "error", None, None)
        [found] = judge(settings, Evidence(None, None), lambda key, where: HERE)  # type: ignore[arg-type]
        assert found.message.startswith("1 metric")
        assert found.message.endswith(said)


@pytest.mark.parametrize(
    ("measurements", "status", "measured"),
    [
        ([GIVEN], "passed", 0.5),
        ([], "passed", 0.0),
        ([replace(GIVEN, undefined=NONE)], "skipped", None),
        ([replace(GIVEN, undefined=NONE), replace(GIVEN, undefined=NONE)], "skipped", None),
        ([replace(GIVEN, undefined="pass")], "passed", None),
        ([replace(GIVEN, undefined="fail")], "failed", None),
        ([replace(GIVEN, value=2.0)], "failed", 2.0),
        ([replace(GIVEN, value=float("nan"))], "failed", None),
    ],
)
def test_what_is_not_measured_has_not_passed(
    measurements: list[Measurement], status: str, measured: float | None
) -> None:
    [outcome] = judged(*measurements)
    assert (outcome.status, outcome.measured) == (status, measured)
    assert ("measured" in outcome.reasons) == (measured is None)


def test_a_skipped_rule_says_why_and_of_how_many() -> None:
    [outcome] = judged(*[replace(GIVEN, text=f"the loss of {k} has no value", undefined=NONE) for k in range(3)])
    assert outcome.message == "the loss of 0 has no value; 2 more without a value"


def test_what_is_not_known_is_said_beside_what_is() -> None:
    unknown = [replace(GIVEN, text=f"the loss of {k} has no value", undefined=NONE) for k in range(2)]
    passed, skipped = judged(unknown[0], GIVEN)
    assert (passed.status, passed.message) == ("passed", "half")
    assert (skipped.status, skipped.message) == ("skipped", "the loss of 0 has no value")
    passed, skipped = judged(unknown[0], replace(GIVEN, undefined="pass"))
    assert (passed.status, passed.measured, skipped.status) == ("passed", None, "skipped")
    failed, skipped = judged(*unknown, replace(GIVEN, value=2.0), GIVEN)
    assert (failed.status, failed.measured) == ("failed", 2.0)
    assert (skipped.status, skipped.message) == ("skipped", "the loss of 0 has no value; 1 more without a value")


def test_findings_come_worst_first_and_warn_where_the_rule_does() -> None:
    found = judged(*[replace(GIVEN, value=v) for v in (2.0, 0.1, 9.0)], level="warn")
    assert [(o.status, o.measured) for o in found] == [("warned", 9.0), ("warned", 2.0)]

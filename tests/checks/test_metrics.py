"""Which numbers of a report are drift metrics: those that are opted in, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import sample_reports as sample
from pydantic import create_model
from running_checks import Duat, few_bundled

from duat_cli.checks.baseline import Metric, metric_of
from duat_cli.checks.metrics import report_metrics
from duat_cli.checks.paths import is_metric, places
from duat_cli.checks.registry import all_rules
from duat_cli.checks.tolerances import default_tolerance
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.results.base import Finite
from duat_cli.results.inspect import Block, InspectReport
from duat_cli.results.meaning import Meaning
from duat_cli.results.operator import Coupling

FIRST = Path(__file__).parents[1] / "fixtures" / "baseline_0_1_0.json"
METRICS = Meaning(drift="group")


def test_the_demo_has_the_metrics_that_0_1_0_wrote(tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    with few_bundled(1):  # which say the same keys as all
        assert duat("check", demo_path(), "-q", "--baseline", file, "--update-baseline").code == 0
    keys = set(json.loads(file.read_text())["metrics"])
    answers = {key for key in keys if key.startswith("behaviour.")}
    assert keys - answers == set(json.loads(FIRST.read_text())["metrics"])
    assert {key.partition(".")[2] for key in answers} == {"entropy", "logit_range", "loss_per_byte", "loss_per_token"}
    assert len(keys) == 233


def test_every_metric_belongs_to_a_rule_about_drift() -> None:
    rules = {name for name, rule in all_rules().items() if "baseline" in rule.needs}
    assert {place.rule for place in places().values() if place.is_number and place.watched} <= rules
    assert {metric_of(key).rule for key in json.loads(FIRST.read_text())["metrics"]} <= rules
    assert metric_of("blocks.1.coupling_weighted.mean_distance").rule == "drift.coupling"
    assert metric_of("summary.linear_share").rule == "drift.summary"


def test_what_a_key_of_a_baseline_names() -> None:
    tensor = metric_of("weights.model.layers.3.mlp.weight")
    assert (tensor.kind, tensor.name, tensor.block) == ("tensor", "model.layers.3.mlp.weight", 3)
    number = metric_of("blocks.12.operator.effective_heads")
    assert (number.kind, number.name, number.block) == ("field", "blocks.12.operator.effective_heads", 12)
    assert metric_of("integrity.dead_neurons").kind == "count"
    assert metric_of("blocks.0.of.another.version") == Metric("field", "blocks.0.of.another.version", "", 0)
    assert metric_of("nothing.known").kind == "unknown"


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [
        ("**", True),
        ("blocks.*.coupling.*", True),
        ("summary.linear_share", True),
        ("blocks.*.coupling.distance_deviation", False),  # it is not opted in
        ("blocks.*.couplings.*", False),
        ("*", False),
    ],
)
def test_which_patterns_reach_a_metric_of_a_forward_pass(pattern: str, holds: bool) -> None:
    assert is_metric(pattern) == holds


def with_a_new_statistic(field: object, group: Meaning = METRICS) -> InspectReport:
    """A report of a version whose `coupling` has one more field."""
    coupling: Any = create_model("NewCoupling", __base__=Coupling, novelty=(field, ...))
    block: Any = create_model("NewBlock", __base__=Block, coupling=(Annotated[coupling, group], ...))
    report: Any = create_model("NewReport", __base__=InspectReport, blocks=(Annotated[list[block], METRICS], ...))
    document = sample.inspect_report(per_prompt=True).model_dump()
    for known in document["blocks"]:
        known["coupling"]["novelty"] = 0.5
    return report.model_validate(document)


BITS = "bits", "exact"


@pytest.mark.parametrize("field", [Finite, Annotated[Finite, Meaning(*BITS)]], ids=["no metadata", "not opted in"])
def test_a_new_statistic_is_no_drift_metric(field: object) -> None:
    assert report_metrics(with_a_new_statistic(field)) == report_metrics(sample.inspect_report(per_prompt=True))


def test_a_new_statistic_that_is_opted_in_is_one() -> None:
    before = report_metrics(sample.inspect_report(per_prompt=True))[0]
    after = report_metrics(with_a_new_statistic(Annotated[Finite, Meaning(*BITS, drift="number")]))[0]
    blocks = [block.index for block in sample.inspect_report().blocks]
    assert {k: v for k, v in after.items() if k not in before} == {f"blocks.{i}.coupling.novelty": 0.5 for i in blocks}


def test_a_group_that_is_not_opted_in_holds_none() -> None:
    found = report_metrics(with_a_new_statistic(Annotated[Finite, Meaning(*BITS, drift="number")], Meaning()))[0]
    assert not any(".coupling." in key for key in found)
    assert any(".coupling_weighted." in key for key in found)


def test_nothing_but_the_means_over_prompts_is_watched() -> None:
    found, reasons = report_metrics(sample.inspect_report(per_prompt=True, with_terms=True))
    assert {key.split(".")[0] for key in (*found, *reasons)} == {"blocks", "summary"}
    inner = {key.split(".")[2] for key in found if key.startswith("blocks.")}
    assert inner == {"operator", "density", "coupling", "coupling_weighted", "terms"}


def test_a_norm_of_the_operator_is_compared_relatively_and_other_numbers_are_not() -> None:
    keys = report_metrics(sample.inspect_report(spectrum=True))[0]
    without = {key.rsplit(".", 1)[-1] for key in keys if default_tolerance(key, "float32").atol == 0.0}
    assert without == {"frobenius_norm", "spectral_norm"}
    assert {default_tolerance(key, "float32").rtol for key in keys} == {1e-3}
    assert {default_tolerance(key, "float32").better for key in keys} == {None}
    assert default_tolerance("integrity.dead_neurons", "float32").better == "lower"
    assert default_tolerance("weights.null.frobenius_norm", "float32").atol == 1e-4

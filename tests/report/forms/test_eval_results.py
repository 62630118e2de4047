"""The YAML read back by huggingface_hub's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
import yaml
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

import duat_cli as duat
from duat_cli.cli.main import run
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.report.forms.eval_results import model_name, render_eval_results, undecided_eval_results
from duat_cli.results.prompts import set_of

TEXTS = ["def main(argv):", "Return the number of items."]


def read_back(text: str) -> tuple[str, list[EvalResult]]:
    """As the metadata of a card, by the class that reads cards."""
    card = ModelCard(f"---\nlicense: apache-2.0\n{text}---\n# A model\n")
    assert card.data.license == "apache-2.0"
    return card.data.model_name, card.data.eval_results


@pytest.fixture(scope="module")
def report() -> Any:
    return duat.check(demo_path(), prompts=TEXTS)


def test_the_hub_reads_every_number(report: Any) -> None:
    text = report.to_eval_results()
    name, results = read_back(text)
    assert name == "model"  # the folder's
    found = {result.metric_type: result for result in results}
    assert {kind: result.metric_value for kind, result in found.items()} == {
        "loss": report.behaviour.loss_per_token,
        "loss_per_byte": report.behaviour.loss_per_byte,
        "duat_error": report.certificate.relative_error,
        "duat_plain_error": report.certificate.plain_error,
        "failed_checks": 0,
        "warned_checks": 0,
    }
    loss = found["loss"]
    assert (loss.task_type, loss.dataset_type, loss.dataset_name) == (
        "text-generation",
        "prompts",
        f"2 prompts, {sum(p.tokens for p in report.prompts)} tokens",
    )
    assert loss.dataset_args is not None
    assert loss.dataset_args["sha256"] == set_of(report.prompts).sha256
    assert loss.metric_args == {
        "duat": duat.__version__, "transformers": report.environment.transformers, "dtype": "float32",
        "unit": "nats per token",
    }  # fmt: skip
    assert all(type(value) is float for value in (loss.metric_value, found["duat_error"].metric_value))


def test_the_hub_writes_the_same_again(report: Any) -> None:
    [index] = yaml.safe_load(report.to_eval_results()).values()
    assert eval_results_to_model_index(*model_index_to_eval_results(index)) == index


@pytest.mark.parametrize("sound", [True, False])
def test_foreign_strings_stay_strings(sound: bool) -> None:
    foreign = "org/m: - [x]\x1b[2J # \u202e 'y' \"z\" &a *a !!python/object\n---\n"
    text = render_eval_results(sample.check_report(sound=sound, name=foreign))
    assert text.count("model-index:") == 1
    name, results = read_back(text)
    assert name == model_name(foreign)
    assert "\n" not in name
    assert {r.metric_type: r.metric_value for r in results}["failed_checks"] == (0 if sound else 11)


def test_without_a_forward_pass_the_findings_remain() -> None:
    _, results = read_back(duat.check(demo_path(), weights_only=True).to_eval_results())
    assert [(r.metric_type, r.metric_value, r.dataset_type) for r in results] == [
        ("failed_checks", 0, "weights"),
        ("warned_checks", 0, "weights"),
    ]


def test_what_could_not_be_told_is_no_result() -> None:
    text = undecided_eval_results(sample.undecided_report())
    assert yaml.safe_load(text) is None
    assert text.startswith("# duat check could not tell: ")
    assert text.count("\n") == 1


def test_the_command_writes_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--report", "model-card=card.md", "--report", "json=report.json", "-o", "results.yaml"]
    assert run(["check", str(demo_path()), "--weights-only", "--format", "eval-results", *files, "-q"]) == 0
    _, results = read_back((tmp_path / "results.yaml").read_text())
    assert results[0].metric_value == json.loads((tmp_path / "report.json").read_text())["counts"]["failed"]
    assert (tmp_path / "card.md").read_text().startswith("## Checked with duat\n")

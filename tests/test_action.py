"""The GitHub Action: its steps run in a shell as a runner runs them, but those that install or come from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chatting import HELLO, with_chat_template
from children import PATIENCE
from safetensors.torch import load_file, save_file
from short_demo import short_adapter, short_demo

from duat_cli.loading.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "configs" / "action"
DOCUMENT: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
PLAIN = {"weights-only": "true"}
PLACED: dict[tuple[object, ...], dict[str, str]] = {}  # outputs of the step that asks pip where it keeps packages


@dataclass(frozen=True)
class Ran:
    """What a job sees of the action."""

    code: int
    log: str
    outputs: dict[str, str]
    summary: str


def expanded(text: str, known: dict[str, str]) -> str:
    """With every ${{ name }}; another expression is an error of the test."""
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: known[found[1]], str(text))


def outputs_of(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines())


def play(place: Path, inputs: dict[str, str], duat: str = f'exec "{sys.executable}" -m duat_cli "$@"') -> Ran:
    """Every `run` step in turn; `uses`, and the one that installs, are left out. duat: the shell line that stands for
    the installed command."""
    temp = place / "temp"
    shutil.rmtree(temp, ignore_errors=True)
    (temp / "duat" / "bin").mkdir(parents=True)
    program = temp / "duat" / "bin" / "duat"
    program.write_text(f"#!/bin/sh\n{duat}\n", encoding="utf-8")
    program.chmod(0o755)
    given = {name: facts.get("default", "") for name, facts in DOCUMENT["inputs"].items()} | inputs
    known = {f"inputs.{name}": value for name, value in given.items()} | {"runner.temp": str(temp)}
    summary = temp / "summary.md"
    summary.touch()
    log, code, ran = "", 0, 0
    runner = {"CI": "true", "GITHUB_ACTION_PATH": str(ACTION), "RUNNER_TEMP": str(temp)}
    for number, step in enumerate(DOCUMENT["runs"]["steps"]):
        if "run" not in step or "pip install" in step["run"]:
            continue
        here = {name: expanded(value, known) for name, value in step.get("env", {}).items()}
        same = (step["run"], *here.items())
        if same not in PLACED:
            file = temp / f"output{number}"
            file.touch()
            files = {"GITHUB_OUTPUT": str(file), "GITHUB_STEP_SUMMARY": str(summary)}
            script = temp / f"step{number}.sh"
            script.write_text(expanded(step["run"], known), encoding="utf-8")
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", script], env=os.environ | runner | files | here,
                cwd=place, capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            log, code, made = log + done.stdout + done.stderr, done.returncode, outputs_of(file)
            if step["id"] == "place" and not code:
                PLACED[same] = made
        else:
            made = PLACED[same]
        ran += 1
        known |= {f"steps.{step['id']}.outputs.{name}": value for name, value in made.items()}
        if code:
            break
    assert ran == 2 or code
    outputs = {
        name: known.get(re.sub(r"[${}\s]", "", facts["value"]), "") for name, facts in DOCUMENT["outputs"].items()
    }
    return Ran(code, log, outputs, summary.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint, one with NaN, and one whose weights are gone."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("good", "broken", "empty"):
        short_demo(folder / name)
    weights = load_file(folder / "broken" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "broken" / "model.safetensors", {"format": "pt"})
    (folder / "empty" / "model.safetensors").unlink()
    return folder


def documents(ran: Ran) -> tuple[Any, Any]:
    report, sarif = (json.loads(Path(ran.outputs[name]).read_text(encoding="utf-8")) for name in ("report", "sarif"))
    return report, sarif["runs"][0]


def test_a_good_checkpoint_passes(models: Path, tmp_path: Path) -> None:
    """As the fine-tune of itself."""
    ran = play(tmp_path, {"model": str(models / "good"), "base": str(models / "good"), **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (0, "passed")
    report, sarif = documents(ran)
    assert (report["verdict"], report["baseline"]["base"], report["policy"][-1]) == ("passed", True, "policy fine-tune")
    assert sarif["invocations"][0]["executionSuccessful"]
    assert "passed" in ran.summary
    assert "::error" not in ran.log


def test_a_broken_checkpoint_fails_with_annotation_summary_and_files(models: Path, tmp_path: Path) -> None:
    ran = play(tmp_path, {"model": str(models / "broken"), **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (1, "failed")
    report, sarif = documents(ran)
    assert report["verdict"] == "failed"
    assert "integrity.nonfinite" in {result["ruleId"] for result in sarif["results"]}
    assert "integrity.nonfinite" in ran.summary
    assert "::error" in ran.log


def test_what_cannot_be_told_is_code_2_with_the_reason_in_every_place(models: Path, tmp_path: Path) -> None:
    ran = play(tmp_path, {"model": str(models / "empty"), **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (2, "undecided")
    report, sarif = documents(ran)
    assert report["verdict"] == "undecided"
    assert not sarif["invocations"][0]["executionSuccessful"]
    assert report["error"]["message"] in ran.summary
    assert "::error" in ran.log


@pytest.mark.parametrize(
    ("result", "fail_on", "code"),
    [("failed", "undecided", 0), ("failed", "never", 0), ("undecided", "undecided", 2), ("undecided", "never", 0)],
)
def test_fail_on_decides_the_code_and_not_the_result(result: str, fail_on: str, code: int, tmp_path: Path) -> None:
    """Whatever else duat says beside its exit code, which the tests above show to be 1 and 2."""
    ran = play(tmp_path, {"model": "m", "fail-on": fail_on}, f"exit {('passed', 'failed', 'undecided').index(result)}")
    assert (ran.code, ran.outputs["result"]) == (code, result)


def test_every_input_reaches_the_check(models: Path, tmp_path: Path) -> None:
    folder = with_chat_template(tmp_path / "model")
    (tmp_path / "my prompts.txt").write_text("Hello\ndef f(x):\n", encoding="utf-8")
    short_adapter(tmp_path / "adapter")
    given = {"model": str(folder), "prompts": "my prompts.txt", "adapter": "adapter", "policy": "adapter"}
    ran = play(tmp_path, given | {"chat": "true"})
    assert ran.code == 0, ran.log
    report, _ = documents(ran)
    said = load_tokenizer(folder)(HELLO, add_special_tokens=False)["input_ids"]
    assert len(report["prompts"]) == 2
    assert report["prompts"][0]["tokens"] == len(said)
    assert any("adapter" in name for name in report["policy"])
    assert "adapter.magnitude" in {outcome["rule"] for outcome in report["outcomes"]}
    ran = play(tmp_path, {"model": str(models / "good"), "baseline": "nowhere.json", **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (2, "undecided")
    assert "nowhere.json" in ran.log


@pytest.mark.parametrize(
    "inputs",
    [
        {"model": ""},
        {"model": "m", "fail-on": "always"},
        {"model": "m", "weights-only": "yes"},
        {"model": "m", "chat": "yes"},
    ],
    ids=str,
)
def test_a_wrong_input_is_said_and_undecided(inputs: dict[str, str], tmp_path: Path) -> None:
    ran = play(tmp_path, inputs)
    assert (ran.code, ran.outputs["result"]) == (2, "undecided")
    assert f"::error title=duat::input {list(inputs)[-1]}: " in ran.log


def test_a_step_that_never_fails_does_not_for_a_wrong_input(tmp_path: Path) -> None:
    for inputs in ({"model": ""}, {"model": "m", "chat": "yes"}):
        ran = play(tmp_path, inputs | {"fail-on": "never"})
        assert (ran.code, ran.outputs["result"]) == (0, "undecided")
        assert "::error title=duat::input " in ran.log


def test_prompts_that_would_not_run_are_refused(models: Path, tmp_path: Path) -> None:
    ran = play(tmp_path, {"model": str(models / "good"), "prompts": "my.txt", **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (2, "undecided")
    assert "--weights-only and --prompts contradict each other" in ran.log


@pytest.mark.parametrize(
    "text",
    ["$(touch hacked) `touch hacked` '; touch hacked; ' \" && touch hacked; \"", "--help"],
    ids=["shell", "option"],
)
def test_an_input_is_no_command(text: str, tmp_path: Path) -> None:
    ran = play(tmp_path, {"model": text, "policy": text, **PLAIN})
    assert (ran.code, ran.outputs["result"]) == (2, "undecided")
    assert not list(tmp_path.rglob("hacked"))


def test_no_step_writes_an_input_into_a_command() -> None:
    assert not [step["run"] for step in DOCUMENT["runs"]["steps"] if "${{" in step.get("run", "")]


def keys(value: Any, wanted: set[str], optional: set[str]) -> bool:
    return wanted <= set(value) <= wanted | optional


def test_its_form_is_that_of_a_composite_action() -> None:
    assert keys(DOCUMENT, {"name", "description", "runs"}, {"inputs", "outputs", "branding", "author"})
    assert keys(DOCUMENT["runs"], {"using", "steps"}, set())
    assert DOCUMENT["runs"]["using"] == "composite"
    for facts in DOCUMENT["inputs"].values():
        assert keys(facts, {"description"}, {"required", "default", "deprecationMessage"})
        assert isinstance(facts.get("default", ""), str)
    for facts in DOCUMENT["outputs"].values():
        assert keys(facts, {"description", "value"}, set())
    for step in DOCUMENT["runs"]["steps"]:
        also = {"id", "if", "name", "env", "continue-on-error"}
        assert keys(step, {"uses"}, also | {"with"}) or keys(step, {"run", "shell"}, also | {"working-directory"})

"""`duat lora-diff --out`: by one process or several, interrupted or whole, always the report of a plain run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import adapters
import peft
import pytest
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora import eq18, findings
from duat_cli.analysis.lora.prompts import Comparer
from duat_cli.analysis.shards import lora as lora_module
from duat_cli.loading.checkpoint import source
from duat_cli.results import prompts

COUNT = 6


@pytest.fixture(scope="module")
def adapter(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = peft.LoraConfig(r=2, lora_alpha=20, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
    return adapters.make(two_layers, tmp_path_factory.mktemp("adapter"), config)


@pytest.fixture(scope="module")
def tuned(two_layers: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a whole checkpoint."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(two_layers, folder, dirs_exist_ok=True)
    peft.PeftModel.from_pretrained(adapters.load_base(two_layers), adapter).merge_and_unload().save_pretrained(folder)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    file = tmp_path / "two.txt"
    file.write_text("abc.\nde.")
    return file


@pytest.fixture
def said(two_layers: Path, ask: Any) -> Any:
    """Of lora-diff on the two layers."""

    def say(*words: str, **how: Any) -> str:
        return ask("lora-diff", str(two_layers), *words, "--device", "cpu", "--no-cache", **how)

    return say


def test_several_processes_give_the_plain_report(said: Any, ask: Any, tuned: Path, few: Path, tmp_path: Path) -> None:
    """Of an adapter too: see test_of_many_prompts_those_that_moved_most_are_listed."""
    words = [str(tuned), "--prompts", str(few)]
    plain, out = said(*words, known=True), str(tmp_path / "out")
    assert said(*words, "--out", out, rank=1) == ""
    assert said(*words, "--out", out, rank=0) == plain
    assert ask("merge", out) == plain
    report = json.loads(plain)
    assert sorted(one["prompt"] for one in report["by_prompt"]) == list(range(COUNT))
    assert (report["level"], report["eq18"]["holds"]) == ("prompts", True)


def test_the_demo_and_the_bundled_prompts(
    ask: Any, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "demo_path", lambda: short / "demo")
    words = ["lora-diff", "--default-prompts", "--max-tokens", "3"]
    assert ask(*words, "--out", str(tmp_path / "out")) == ask(*words)


def test_of_many_prompts_those_that_moved_most_are_listed(
    said: Any, ask: Any, adapter: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(adapter), "--prompts", str(few)]
    whole = json.loads(said(*words, known=True))
    monkeypatch.setattr(findings, "LISTED", 4)
    monkeypatch.setattr(prompts, "LISTED", 4)
    monkeypatch.setattr(prompts, "FIRST", 2)
    plain, out = said(*words), str(tmp_path / "out")
    said(*words, "--out", out, rank=1)
    assert said(*words, "--out", out, rank=0) == ask("merge", out) == plain
    short = json.loads(plain)
    assert (short["by_prompt"], short["prompts"]) == (whole["by_prompt"][:4], whole["prompts"][:2])
    assert {name for name, value in whole.items() if short[name] != value} == {"by_prompt", "prompts"}
    assert short["prompt_set"]["count"] == COUNT


def test_what_is_torn_is_computed_again(said: Any, ask: Any, adapter: Path, few: Path, taken_up: Any) -> None:
    words = [str(adapter), "--prompts", str(few)]
    plain, out = taken_up(said, *words)
    (out / "eq18.json").unlink()
    assert "the test of Eq. 18 is missing: run the same command again" in ask("merge", str(out), code=2)
    assert said(*words, "--out", str(out)) == plain


def test_eq_18_is_tested_on_the_first_prompts(
    said: Any, adapter: Path, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in (eq18, lora_module):
        monkeypatch.setattr(one, "INPUTS", 4)
    words = [str(adapter), "--prompts", str(two)]
    plain = said(*words)
    assert json.loads(plain)["eq18"]["inputs"] == 4
    assert said(*words, "--out", str(tmp_path / "out")) == plain


@pytest.mark.parametrize(("run_once", "other"), [(0, "adapter"), (1, "tuned")], indirect=["run_once"], ids=str)
def test_every_prompt_is_run_once_with_weights_in_memory_and_read_block_by_block(
    said: Any, few: Path, other: str, request: pytest.FixtureRequest, run_once: Any
) -> None:
    run_once(Comparer, said, str(request.getfixturevalue(other)), "--prompts", str(few))


def test_another_adapter_is_refused(said: Any, adapter: Path, two: Path, tmp_path: Path) -> None:
    out, other = str(tmp_path / "out"), tmp_path / "other"
    said(str(adapter), "--prompts", str(two), "--out", out)
    shutil.copytree(adapter, other)
    assert said(str(other), "--prompts", str(two), "--out", out).startswith("{")  # the same under another name
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, other / "adapter_model.safetensors")
    message = said(str(other), "--prompts", str(two), "--out", out, code=2)
    assert "holds results of another TUNED, " in message
    message = said(str(adapter), "--prompts", str(two), "--out", out, "--directions", code=2)
    assert "another --directions, not given there, given here" in message


def test_another_config_of_the_tuned_checkpoint_is_refused(said: Any, tuned: Path, two: Path, tmp_path: Path) -> None:
    out, other = str(tmp_path / "out"), tmp_path / "other"
    said(str(tuned), "--prompts", str(two), "--out", out)
    shutil.copytree(tuned, other)
    assert said(str(other), "--prompts", str(two), "--out", out).startswith("{")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    message = said(str(other), "--prompts", str(two), "--out", out, code=2)
    assert "holds results of another TUNED, " in message


def test_without_prompts_there_is_nothing_to_keep(said: Any, adapter: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    message = said(str(adapter), "--out", out, code=2)
    assert message == "duat: error: --out: keeps the results of prompts; give --prompts FILE, or --default-prompts\n"

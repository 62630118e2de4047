"""The rules adapter.*."""

from __future__ import annotations

import shutil
from pathlib import Path

import bad_checkpoints as bad
from running_checks import Duat

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rules.adapter import LEVELS
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path


def test_the_adapter_rules_are_the_linter_s() -> None:
    ours = {name.removeprefix("adapter.") for name in all_rules() if name.startswith("adapter.")}
    assert ours == {"behaviour", *(name.replace("-", "_") for name in LEVELS)}  # that needs the model
    levels = [("alpha-zero", "error"), ("untouched", "warning"), ("key-dialect", "note")]
    assert [(name, LEVELS[name]) for name, _ in levels] == levels


def test_findings_lie_in_the_adapter_s_config(tmp_path: Path, duat: Duat) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(demo_adapter_path(), adapter)
    bad.jedit(adapter / "adapter_config.json", lora_alpha=0)
    done = duat("check", demo_path(), "-q", "--weights-only", "--json", "--adapter", adapter)
    [finding] = done.findings()
    assert (finding["rule"], finding["where"]) == ("adapter.alpha_zero", "adapter_config.json")
    assert finding["location"] == {"file": str(adapter / "adapter_config.json"), "line": 1}


def test_tensors_of_another_method_than_the_config_names_are_findings(tmp_path: Path, duat: Duat) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(demo_adapter_path(), adapter)
    bad.jedit(adapter / "adapter_config.json", peft_type="IA3")
    done = duat("check", demo_path(), "-q", "--weights-only", "--json", "--adapter", adapter)
    assert done.rules() == {"adapter.unknown_tensor"}
    assert "'lora_A', 'lora_B' do not belong to a IA3 adapter" in done.findings()[0]["message"]

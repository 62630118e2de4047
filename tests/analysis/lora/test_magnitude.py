"""How large a change is beside its weight: against dense float64, and what the linter makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import adapters
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora.change import adapter_tensors
from duat_cli.analysis.lora.lint import lint_adapter
from duat_cli.analysis.lora.magnitude import relative_norm
from duat_cli.cli.main import run
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.adapter.plan import plans
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.results.lora import LintFinding

CONFIGS = {
    "lora": peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"]),
    "dora": peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]),
    "loha": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


def weights(base: Path) -> BaseWeights:
    return BaseWeights(Source(base, "base", None), inspect_folder(base))


def findings(base: Path, adapter: Path) -> list[LintFinding]:
    with weights(base) as held:
        return lint_adapter(open_adapter(adapter, "adapter"), held)


@pytest.mark.parametrize("method", CONFIGS)
def test_the_relative_norm_is_that_of_peft_s_merge(method: str, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    made = adapters.make(base, tmp_path / "a", CONFIGS[method])
    differences, state = adapters.merged(base, made), adapters.load_base(base).state_dict()
    files = open_adapter(made, "a")
    with weights(base) as held, adapter_tensors(files) as read:
        known = [plan for plan in plans(files, read_keys(files), held) if isinstance(plan, ParameterPlan)]
        found = {plan.parameter: relative_norm(plan, read, held) for plan in known}
    assert found
    for name, ratio in found.items():
        expected = differences[name].double().norm() / state[name].double().norm()
        assert ratio == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("scale", "level"), [(0.5, None), (2.0, "warning"), (52.1, "error")])
def test_a_change_larger_than_its_weight(scale: float, level: str | None, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    made = adapters.make(base, tmp_path / "a", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    difference = adapters.merged(base, made)
    state = adapters.load_base(base).state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    ratio = float(difference[name].norm() / state[name].norm())
    file = made / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if "lora_B" in key:
            tensors[key] *= scale / ratio if ".layers.1." in key else 1e-3 / ratio
    save_file(tensors, file)
    found = [f for f in findings(base, made) if f.rule == "magnitude"]
    assert [(f.level, f.where) for f in found] == ([] if level is None else [(level, name)])
    if level is not None:
        assert f"{scale:.3g} times its base weight" in found[0].message
    assert run(["lora-diff", str(base), str(made), "--lint", "-q"]) == (1 if level == "error" else 0)
    assert run(["check", str(base), "--adapter", str(made), "--weights-only", "-q"]) == (1 if level == "error" else 0)


def test_a_saved_head_over_a_tied_base(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    model = adapters.load_base(base)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    tied = tmp_path / "tied"
    model.save_pretrained(tied)
    assert not config["tie_word_embeddings"]
    for folder, expected in ((base, []), (tied, ["tied-weights"])):
        made = tmp_path / f"of {folder.name}"
        adapters.make(base, made, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        found = [f for f in findings(folder, made) if f.rule == "tied-weights"]
        assert [f.rule for f in found] == expected
        assert all("lm_head" in f.message and f.level == "warning" for f in found)


def test_a_head_and_its_embedding_saved_alike_are_silent(tmp_path: Path) -> None:
    base = adapters.base_of("gpt2", tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head", "wte"], fan_in_fan_out=True)
    made = adapters.make(base, tmp_path / "a", config)
    file = made / "adapter_model.safetensors"
    tensors = load_file(file)
    head = next(key for key in tensors if "lm_head" in key)
    table = next(key for key in tensors if "wte" in key)
    for value, expected in ((tensors[table].clone(), 0), (tensors[table] + 1, 1)):
        save_file({**tensors, head: value}, file)
        assert len([f for f in findings(base, made) if f.rule == "tied-weights" and "saved" in f.message]) == expected
    assert torch.equal(tensors[table], load_file(file)[table])

"""Each lint rule on a file that has its fault, and silence on a good one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import peft
import pytest
import torch
import transformers
from adapters import weights_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.analysis.lora.weights.change import adapter_tensors
from duat_cli.analysis.lora.weights.lint import lint_adapter, relative_norm
from duat_cli.checks.rules.adapter import LEVELS
from duat_cli.cli.main import run
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.adapter.keys import PREFIX, read_keys
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.adapter.plan import plans
from duat_cli.results.lora import LintFinding

A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lint")
    base = adapters.base_of("llama", folder / "base")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"])
    return base, adapters.make(base, folder / "adapter", config)


def findings(base: Path | None, adapter: Path) -> list[LintFinding]:
    files = open_adapter(adapter, "adapter")
    if base is None:
        return lint_adapter(files)
    with weights_of(base) as weights:
        return lint_adapter(files, weights)


def broken(adapter: Path, folder: Path, edit: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    shutil.copytree(adapter, folder)
    file, stated = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(file), json.loads(stated.read_text())
    edit(tensors, config)
    save_file(tensors, file)
    stated.write_text(json.dumps(config))
    return folder


def _nan(t: Tensors, c: dict[str, Any]) -> None:
    t[A][0, 0] = float("nan")


def _untouched(t: Tensors, c: dict[str, Any]) -> None:
    t[B].zero_()


def _narrow(t: Tensors, c: dict[str, Any]) -> None:
    t[A] = torch.ones(3, 5)


def _elsewhere(t: Tensors, c: dict[str, Any]) -> None:
    t[A.replace("layers.1", "layers.9")], t[B.replace("layers.1", "layers.9")] = t[A].clone(), t[B].clone()


def _half(t: Tensors, c: dict[str, Any]) -> None:
    del t[B]


def _magnitude(t: Tensors, c: dict[str, Any]) -> None:
    t[A.replace("lora_A.weight", "lora_magnitude_vector")] = torch.ones(len(t[B]))


def _saved(t: Tensors, c: dict[str, Any]) -> None:
    t["base_model.model.model.embed_tokens.weight"] = torch.ones(96, 32)


def _caught(t: Tensors, c: dict[str, Any]) -> None:
    t["base_model.model.model.layers.0.input_layernorm.weight"] = torch.ones(32)
    c["modules_to_save"] = ["norm"]


FAULTS: dict[str, Callable[[Tensors, dict[str, Any]], None]] = {
    "alpha-zero": lambda t, c: c.update(lora_alpha=0),
    "dora-magnitude-missing": lambda t, c: c.update(use_dora=True),
    "dora-flag-missing": _magnitude,
    "factor-missing": _half,
    "non-finite": _nan,
    "saved-missing": lambda t, c: c.update(modules_to_save=["embed_tokens"]),
    "rank-mismatch": lambda t, c: c.update(r=4),
    "shape-mismatch": _narrow,
    "target-absent": _elsewhere,
    "mutated-base": lambda t, c: c.update(init_lora_weights="pissa"),
    "module-saved-by-accident": _caught,
    "target-unmatched": lambda t, c: c.update(target_modules=["q_proj", "o_proj", "up_proj"]),
    "base-name": lambda t, c: c.update(base_model_name_or_path="org/other-7b"),
    "untouched": _untouched,
    "embedding-saved": _saved,
    "config": lambda t, c: c.update(alpha_pattern={"q_proj": "high"}),
    "foreign-code": lambda t, c: c.update(megatron_config={"a": 1}, megatron_core="os"),
    "convolution": lambda t, c: t.update({A: torch.ones(3, 4, 2, 2)}),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_every_fault_is_found_by_its_rule(rule: str, good: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = good
    found = findings(base, broken(adapter, tmp_path / "a", FAULTS[rule]))
    assert rule in [f.rule for f in found]
    assert all(f.level == LEVELS[f.rule] for f in found if f.rule != "magnitude")  # of its own tests
    if LEVELS[rule] == "error":
        assert found[0].level == "error"  # errors first


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        (lambda key: f"{PREFIX}{key}", "with twice the prefix 'base_model.model.'"),
        (lambda key: key.removeprefix(PREFIX), "without the prefix 'base_model.model.'"),
        (lambda key: key.replace(".weight", ".default.weight"), "with the adapter's name"),
    ],
)
def test_keys_that_peft_does_not_write_are_read_and_named(
    renamed: Callable[[str], str], said: str, good: tuple[Path, Path], tmp_path: Path
) -> None:
    def rename(tensors: Tensors, config: dict[str, Any]) -> None:
        for key in list(tensors):
            tensors[renamed(key)] = tensors.pop(key)

    folder = broken(good[1], tmp_path / "a", rename)
    [found] = findings(good[0], folder)
    assert (found.rule, said in found.message) == ("key-dialect", True)
    ours, expected = adapters.ours(good[0], folder), adapters.ours(good[0], good[1])
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    if "prefix" in said:
        peft_s = adapters.merged(good[0], folder)
        assert not any(peft_s[name].any() for name in expected)


@pytest.mark.parametrize("with_base", [True, False])
def test_a_good_adapter_has_no_findings(with_base: bool, good: tuple[Path, Path]) -> None:
    base, adapter = good
    assert findings(base if with_base else None, adapter) == []


def test_a_layer_whose_tensors_were_lost_is_named(good: tuple[Path, Path], tmp_path: Path) -> None:
    def lose(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    found = findings(good[0], broken(good[1], tmp_path / "a", lose))
    assert [(f.rule, f.level) for f in found] == [("target-unmatched", "warning")]
    assert "'model.layers.1.self_attn.o_proj', 'model.layers.1.self_attn.q_proj'" in found[0].message


@pytest.mark.parametrize("out", [["up_proj"], r".*up_proj", r".*\.mlp\.up_proj"])
def test_a_target_that_exclude_modules_takes_out_is_no_finding(
    out: str | list[str], good: tuple[Path, Path], tmp_path: Path
) -> None:
    targets = ["q_proj", "o_proj", "up_proj"]  # as PEFT writes 'all-linear' out
    folder = broken(good[1], tmp_path / "a", lambda t, c: c.update(target_modules=targets, exclude_modules=out))
    assert findings(good[0], folder) == []


@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_saved_module_whose_tensor_was_lost_is_an_error_as_peft_does_not_load_it(
    names: list[str], good: tuple[Path, Path], tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    made = adapters.make(good[0], tmp_path / "whole", config)
    assert "saved-missing" not in [f.rule for f in findings(good[0], made)]

    def lose(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors["base_model.model.lm_head.weight"]

    folder = broken(made, tmp_path / "a", lose)
    [found] = [f for f in findings(good[0], folder) if f.rule == "saved-missing"]
    assert found.level == "error"
    assert "names 'lm_head', which" in found.message
    with pytest.raises(KeyError, match="lm_head"):
        peft.PeftModel.from_pretrained(adapters.load_base(good[0]), folder)
    alone = [f.level for f in findings(None, folder) if f.rule == "saved-missing"]
    assert alone == (["warning"] if names == ["lm_head"] else [])  # another was saved: without the base it may be tied


def test_a_head_that_peft_names_by_itself_and_the_base_lacks_is_no_finding(tmp_path: Path) -> None:
    bare, base = adapters.base_of("bert", tmp_path / "bare"), tmp_path / "base"
    transformers.BertForSequenceClassification.from_pretrained(bare).save_pretrained(base)
    made = adapters.make(base, tmp_path / "a", peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    assert open_adapter(made, "a").config["modules_to_save"] == ["classifier", "score"]
    for folder in (bare, base, None):
        assert "saved-missing" not in [f.rule for f in findings(folder, made)]


def test_a_target_that_exclude_modules_takes_out_of_one_layer_is_still_called_lost(
    good: tuple[Path, Path], tmp_path: Path
) -> None:
    stated = {"target_modules": ["q_proj", "o_proj", "up_proj"], "exclude_modules": r".*layers\.0\.mlp\.up_proj"}
    found = findings(good[0], broken(good[1], tmp_path / "a", lambda t, c: c.update(stated)))
    assert [f.rule for f in found] == ["target-unmatched"]


def test_a_base_is_known_by_the_last_part_of_its_hub_id(good: tuple[Path, Path], tmp_path: Path) -> None:
    for number, (name, said) in enumerate((("org/BASE", 0), ("./other", 0), ("other", 0), ("org/other", 1))):
        folder = broken(good[1], tmp_path / str(number), lambda t, c, n=name: c.update(base_model_name_or_path=n))
        assert [f.rule for f in findings(good[0], folder)] == ["base-name"] * said


def test_experts_and_tied_weights(tmp_path: Path) -> None:
    base = adapters.base_of("qwen3_moe", tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    found = findings(base, adapters.make(base, tmp_path / "a", config))
    assert [f.rule for f in found] == ["expert-keys"]
    base = adapters.base_of("gpt2", tmp_path / "tied")
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "wte"], fan_in_fan_out=True)
    found = findings(base, adapters.make(base, tmp_path / "b", config))
    assert "two-tied-deltas" in [f.rule for f in found]
    config = peft.TrainableTokensConfig(token_indices=[1], target_modules=["wte"])  # one change, under both names
    assert findings(base, adapters.make(base, tmp_path / "d", config)) == []
    config = peft.LoraConfig(r=2, target_modules=["wte"])
    assert "tied-weights" in [f.rule for f in findings(base, adapters.make(base, tmp_path / "c", config))]


@pytest.mark.parametrize(
    "stated",
    [
        {"megatron_config": {"tensor_model_parallel_size": 1}},  # PEFT imports its default, megatron.core
        {"megatron_core": "evil"},
        {"megatron_core": ["evil"]},
        {"auto_mapping": {"base_model_class": "Net", "parent_library": "evil"}},
        {"auto_mapping": {"base_model_class": "Net", "parent_library": "transformers_modules.org.model.evil"}},
        {"auto_mapping": {"base_model_class": "Net"}},
        {"auto_mapping": "evil.Net"},
        {"auto_map": {"AutoModel": "evil.Net"}},
        {"custom_modules": {"torch.nn.Linear": "evil.Linear"}},
    ],
)
def test_modules_named_for_import_are_an_error_and_not_imported(
    stated: dict[str, Any], good: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    base, adapter = good
    [found] = findings(base, broken(adapter, tmp_path / "a", lambda t, c: c.update(stated)))
    assert (found.rule, found.level) == ("foreign-code", "error")
    assert found.message.split()[0] in ("megatron_core", "auto_mapping", "auto_map", "custom_modules")
    assert "evil" not in sys.modules


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("config", [peft.LoraConfig, peft.AdaLoraConfig, peft.IA3Config, peft.LoHaConfig])
def test_what_peft_writes_by_itself_names_no_foreign_code(config: Any, task_type: str | None, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    more = {"feedforward_modules": []} if config is peft.IA3Config else {}
    more |= {"total_step": 10} if config is peft.AdaLoraConfig else {}
    made = adapters.make(base, tmp_path / "a", config(target_modules=["q_proj"], task_type=task_type, **more))
    written = json.loads((made / "adapter_config.json").read_text())
    assert (written["auto_mapping"] is None) == (task_type is not None)
    if config is peft.LoraConfig:
        assert (written["megatron_core"], written["megatron_config"]) == ("megatron.core", None)
    assert "foreign-code" not in [f.rule for f in findings(base, made)]


# -- how large a change is beside its weight, against dense float64 -------------------------------------------

CONFIGS = {
    "lora": peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"]),
    "dora": peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]),
    "loha": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_the_relative_norm_is_that_of_peft_s_merge(method: str, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    made = adapters.make(base, tmp_path / "a", CONFIGS[method])
    differences, state = adapters.merged(base, made), adapters.load_base(base).state_dict()
    files = open_adapter(made, "a")
    read = adapter_tensors(files)
    with weights_of(base) as held:
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


def test_the_copy_of_a_tied_head_that_peft_saves_is_no_saved_head(tmp_path: Path) -> None:
    base = adapters.base_of("gemma2", tmp_path / "base")
    made = adapters.make(base, tmp_path / "made", peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    assert any(key.endswith("lm_head.base_layer.weight") for key in load_file(made / "adapter_model.safetensors"))
    (found,) = [f for f in findings(base, made) if f.rule == "tied-weights"]
    assert "unmerged it does not" in found.message


@pytest.mark.parametrize("part", ["lora_magnitude_vector", "lora_B.default.bias"])
def test_a_zero_b_beside_what_was_trained_is_not_untouched(part: str, tmp_path: Path) -> None:
    base = adapters.base_of("opt", tmp_path / "base")
    dora = part == "lora_magnitude_vector"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=dora, lora_bias=not dora)

    def without_b(tuned: Any) -> None:
        for name, parameter in tuned.named_parameters():
            if "lora_B.default.weight" in name:
                parameter.zero_()

    trained = adapters.make(base, tmp_path / "trained", config, edit=without_b)
    assert "untouched" not in {f.rule for f in findings(base, trained)}
    assert "untouched" not in {f.rule for f in lint_adapter(open_adapter(trained, "a"))}
    untrained = tmp_path / "untrained"
    peft.get_peft_model(adapters.load_base(base), config).save_pretrained(untrained)
    assert "untouched" in {f.rule for f in findings(base, untrained)}


def test_lora_on_a_resized_table_is_said_to_be_that(good: tuple[Path, Path], tmp_path: Path) -> None:
    model = adapters.load_base(good[0])
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 4)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "lm_head", "q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    said = [f.message for f in findings(good[0], tmp_path / "adapter") if f.rule == "shape-mismatch"]
    assert len(said) == 2
    for name, message in zip(("lm_head", "model.embed_tokens"), sorted(said), strict=True):
        assert message.startswith(f"'{name}': the vocabulary was resized, from the base's {rows} rows to {rows + 4}: ")
        assert "another base model" not in message


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

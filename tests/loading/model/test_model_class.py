"""Which class a checkpoint is built with."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
import transformers
from children import forked
from refusals import refusal_of_load
from transformers import dynamic_module_utils

from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import load

NAMELESS = pytest.mark.parametrize("names", [None, [], ["Nonesuch"], ["BertModel"], ["PreTrainedTokenizerFast"]])


@NAMELESS
def test_the_class_for_next_tokens_where_none_is_named_and_the_files_fill_it(
    names: list[str] | None, sound: Path
) -> None:
    bad.jedit(sound / bad.CFG, architectures=names)
    loaded = load(str(sound))
    assert type(loaded.model) is transformers.LlamaForCausalLM
    [warning] = loaded.warnings
    assert "architectures" in warning
    assert warning.endswith("loaded as LlamaForCausalLM, which the files fill")
    assert fingerprint(loaded.model) == fingerprint(transformers.LlamaForCausalLM.from_pretrained(sound))


@pytest.mark.parametrize("extra", [True, False])
def test_the_base_model_where_the_files_lack_a_head_or_hold_more(extra: bool, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, architectures=None)
    bad.wedit(sound, lambda s: {**s, "score.weight": s["lm_head.weight"].clone()} if extra else _headless(s))
    loaded = load(str(sound))
    assert type(loaded.model) is transformers.LlamaModel
    assert any("LlamaModel, without a head" in w for w in loaded.warnings)
    assert any("score.weight" in w for w in loaded.warnings) == extra


@pytest.mark.parametrize("cls", [transformers.ViTForImageClassification, transformers.ViTModel])
def test_classes_of_pictures_where_the_files_hold_them(cls: type[transformers.PreTrainedModel], tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    cls(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    bad.jedit(tmp_path / bad.CFG, architectures=None)
    assert type(load(str(tmp_path)).model) is cls


def test_a_base_models_own_file_is_given_no_head_though_it_is_tied(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20, n_positions=8)
    assert config.tie_word_embeddings
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    bad.jedit(tmp_path / bad.CFG, architectures=None)
    assert type(load(str(tmp_path)).model) is transformers.GPT2Model


def _headless(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@NAMELESS
def test_the_base_model_where_no_class_is_named(names: list[str] | None, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, architectures=names)
    bad.wedit(sound, lambda s: {**s, "score.weight": s["lm_head.weight"].clone()})
    loaded = load(str(sound))
    assert type(loaded.model) is transformers.LlamaModel
    assert any("architectures" in w and "LlamaModel, without a head" in w for w in loaded.warnings)
    assert any("lm_head.weight" in w for w in loaded.warnings)
    with_head = transformers.LlamaForCausalLM.from_pretrained(sound).model
    assert fingerprint(loaded.model) == fingerprint(with_head)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_layers_without_are_said_not_to_be_zero(value: float, sound: Path) -> None:
    """GPTQ's tools store zeros there."""
    place = "model.layers.1.mlp.up_proj"
    bad.wedit(sound, lambda s: {**s, f"{place}.bias": torch.full((len(s[f"{place}.weight"]),), value)})
    warnings = load(str(sound)).warnings
    assert any("unexpected tensor" in warning for warning in warnings)
    told = [warning for warning in warnings if "not zero" in warning]
    assert len(told) == (value != 0)
    assert all(warning.startswith(f"'{place}.bias': not zero, but LlamaForCausalLM adds no bias") for warning in told)


def test_custom_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    bad.build("cfg_auto_map_code", folder)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    # apart, as the code of a checkpoint is registered for the rest of the process
    assert forked(lambda: load(str(folder), trust_remote_code=True)) == 0
    assert (folder / "PWNED").exists()


def test_a_config_that_no_class_can_be_built_from(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, num_attention_heads=5)
    assert "config.json" in refusal_of_load(str(sound))

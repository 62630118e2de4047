"""Which modules a config targets: by PEFT's own rule; and the modules that an adapter lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapters
import peft
import pytest
import torch
from adapters import weights_of
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file

from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.folder import ADAPTER_WEIGHTS, open_adapter
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.adapter.targets import lost_modules, targeted

MODULES = [
    f"{prefix}{stack}.{number}.{leaf}"
    for prefix in ("", "model.", "vision.encoder.")
    for stack in ("layers", "h")
    for number in (0, 1, 11)
    for leaf in ("q_proj", "mlp.up_proj", "mlp.experts.2.up_proj", "cross.q_proj")
] + ["lm_head", "model.embed_tokens", "q_proj"]
CONFIGS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "up_proj"]},
    {"target_modules": ["layers.1.q_proj", "lm_head"]},
    {"target_modules": r"model\.layers\.(0|1)\..*q_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": r"(?i).*Q_PROJ"},
    {"target_modules": "q_proj|lm_head"},
    {"target_modules": ["q_proj"], "exclude_modules": ["cross.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": r".*vision.*"},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "layers.1"]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 11]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["layers", "h"]},
    {"target_parameters": ["experts.up_proj"]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_module_is_targeted_as_peft_says(config: dict[str, Any]) -> None:
    stated = peft.LoraConfig(**config)
    found = {module: targeted(config, module) for module in MODULES}
    assert found == {module: bool(check_target_module_exists(stated, module)) for module in MODULES}


def test_all_linear_is_every_layer_and_a_broken_pattern_is_refused() -> None:
    assert targeted({"target_modules": "all-linear"}, "model.layers.0.q_proj")
    with pytest.raises(CheckpointError, match="no regular expression"):
        targeted({"target_modules": "(q_proj"}, "q_proj")


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r"model\.layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_the_modules_of_a_layer_that_was_lost(config: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    folder = adapters.make(base, tmp_path / "adapter", peft.LoraConfig(r=2, **config))
    file = folder / "adapter_model.safetensors"
    whole = {prefix + name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}

    def lost() -> list[str]:
        adapter = open_adapter(folder, "adapter")
        return lost_modules(adapter, read_keys(adapter), weights_of(base))

    save_file(whole, file)
    assert lost() == []
    save_file({name: tensor for name, tensor in whole.items() if "layers.1.mlp" not in name}, file)
    expected = {name.rpartition(".lora_")[0].removeprefix(prefix) for name in whole if "layers.1.mlp" in name}
    assert expected
    assert set(lost()) == expected
    stated = folder / "adapter_config.json"
    stated.write_text(stated.read_text().replace('"exclude_modules": null', '"exclude_modules": ".*layers.1.mlp.*"'))
    assert lost() == []


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_tensors_of_no_real_numbers_are_one_line(side: str, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", peft.LoraConfig(target_modules=["q_proj"], r=2))
    file = adapter / ADAPTER_WEIGHTS
    tensors = load_file(file)
    name = next(name for name in tensors if side in name)
    save_file({**tensors, name: tensors[name].to(torch.complex64)}, file)
    with pytest.raises(CheckpointError, match=r"stored as C64 \(complex numbers\).*: save the adapter in") as caught:
        open_adapter(adapter, "adapter")
    assert name in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)

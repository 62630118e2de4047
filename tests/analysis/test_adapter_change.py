"""Every way PEFT stores a change, against PEFT's own merge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
import adapters

ATTENTION = ["q_proj", "o_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]


def lora(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ATTENTION, **fields})


CASES: dict[str, tuple[str, Any]] = {
    "lora": ("llama", lora()),
    "all linear": ("llama", lora(target_modules="all-linear")),
    "rslora": ("llama", lora(use_rslora=True)),
    "patterns": (
        "llama",
        lora(
            rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 4, r"layers\.\d+\.self_attn\.o_proj": 1},
            alpha_pattern={"o_proj": 7, "q_proj": 9},
        ),
    ),
    "conv1d": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True)),
    "conv1d dora": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True, use_dora=True)),
    "bias all": ("opt", lora(target_modules=["q_proj"], bias="all")),
    "bias lora_only": ("opt", lora(target_modules=["q_proj"], bias="lora_only")),
    "lora bias": ("opt", lora(target_modules=["q_proj"], lora_bias=True)),
    "modules to save": ("llama", lora(modules_to_save=["norm", "lm_head"])),
    "dora": ("llama", lora(use_dora=True)),
    "embedding": ("llama", lora(target_modules=["embed_tokens", "q_proj"])),
    "embedding dora": ("llama", lora(target_modules=["embed_tokens"], use_dora=True)),
    "tokens": ("llama", lora(trainable_token_indices=[3, 11, 4])),
    "tokens by name": ("llama", lora(trainable_token_indices={"embed_tokens": [7]})),
    "tokens alone": ("llama", peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"])),
    "pissa": ("llama", lora(init_lora_weights="pissa")),
    "pissa conv1d": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True, init_lora_weights="pissa")),
    "olora": ("llama", lora(init_lora_weights="olora", lora_alpha=3)),
    "olora scaled": ("llama", lora(init_lora_weights="olora")),
    "orthogonal": ("llama", lora(init_lora_weights="orthogonal", r=4)),
    "gaussian": ("llama", lora(init_lora_weights="gaussian")),
    "experts": (
        "qwen3_moe",
        lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "experts transposed": (
        "gpt_oss",
        lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "mixtral experts": ("mixtral", lora(target_modules=[], target_parameters=["experts.down_proj"])),
    "adalora": ("llama", peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=ATTENTION)),
    "ia3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "ia3 bias": ("opt", peft.IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"])),
    "ia3 conv1d": ("gpt2", peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])),
    "loha": ("llama", peft.LoHaConfig(r=3, alpha=5, target_modules=ATTENTION)),
    "lokr": ("llama", peft.LoKrConfig(r=3, alpha=5, target_modules=ATTENTION)),
    "lokr both": ("llama", peft.LoKrConfig(r=2, alpha=5, target_modules=ATTENTION, decompose_both=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_change_is_pefts_merge(name: str, tmp_path: Path) -> None:
    model_type, config = CASES[name]
    base = adapters.base_of(model_type, tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", config)
    expected, found = adapters.merged(base, adapter), adapters.ours(base, adapter)
    moved = {key for key, change in expected.items() if float(change.norm()) > 1e-6}
    assert moved
    assert moved <= set(found)
    for key, change in found.items():
        size = max(1.0, float(expected[key].norm()))
        torch.testing.assert_close(change, expected[key], rtol=0, atol=1e-6 * size, msg=lambda m, k=key: f"{k}: {m}")

"""The Gram cache answers for one model only, and never changes a number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import quiet
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from duat_cli.analysis import geometry
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.operators.kronecker import HeadFactors
from duat_cli.zoo import tiny

Encoded = Callable[..., list[Prompt]]


@pytest.fixture
def llama(checkpoint: Path, tmp_path: Path) -> Path:
    """A llama whose tensors are also those of a gemma, and of a llama with half as many heads."""
    folder = tmp_path / "llama"
    shutil.copytree(checkpoint, folder)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=259,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tiny.randomise(model, 3)
    model.save_pretrained(folder)
    return folder


def under(folder: Path, name: str, **changes: Any) -> Path:
    """The same weight file under another config."""
    other = folder.parent / name
    shutil.copytree(folder, other)
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return other


def numbers(folder: Path, prompts: Encoded, *, cached: bool = True) -> Any:
    loaded: LoadedModel = load(str(folder))
    report = inspect(loaded, prompts(loaded, "def f(x):"), InspectOptions(cache=cached), quiet)
    return report.certificate.exact, [b.operator.model_dump() for b in report.blocks], report.model.fingerprint


def test_the_same_weights_under_another_class_are_another_model(llama: Path, prompts: Encoded, cache: Path) -> None:
    changes = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_activation": "silu"}
    gemma = under(llama, "gemma", **changes)
    first, second = numbers(llama, prompts), numbers(gemma, prompts)
    assert first[2] == second[2]  # the weights are the same
    assert second == numbers(gemma, prompts, cached=False)
    assert second == numbers(gemma, prompts)
    assert first[1][0]["frobenius_norm"] != pytest.approx(second[1][0]["frobenius_norm"], rel=0.1)
    assert len(list(cache.iterdir())) == 2


def test_the_same_weights_with_other_heads_are_another_model(llama: Path, prompts: Encoded, cache: Path) -> None:
    wide = under(llama, "wide", num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    numbers(llama, prompts)
    assert numbers(wide, prompts) == numbers(wide, prompts, cached=False)


def scaled(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = 2 * tensors[name]

    return change


def cut(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0"] = tensors["layers.0"][:2, :2]


@pytest.mark.parametrize("change", [scaled("layers.0"), scaled("layers.1.entries"), cut])
def test_what_the_cache_holds_is_held_against_the_weights(
    change: Callable[[dict[str, Tensor]], None], llama: Path, prompts: Encoded, cache: Path
) -> None:
    sound = numbers(llama, prompts)
    [file] = cache.iterdir()
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    assert numbers(llama, prompts) == sound
    assert numbers(llama, prompts) == sound  # and mended on disk


def test_of_blocks_with_many_heads_one_is_kept_and_none_on_disk(
    checkpoint: Path, prompts: Encoded, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = numbers(checkpoint, prompts, cached=False)
    monkeypatch.setattr(geometry, "KEPT_HEADS", 3)
    assert numbers(checkpoint, prompts) == expected
    assert not list(cache.glob("**/*.safetensors"))
    known: dict[str, geometry.Geometry] = {}
    heads = HeadFactors(torch.ones(4, 5, 2), torch.ones(4, 2, 5))
    first = geometry.known_or(lambda: geometry.bare(heads), "first", known)
    assert geometry.known_or(lambda: geometry.bare(heads), "first", known) is first
    geometry.known_or(lambda: geometry.bare(heads), "second", known)
    assert list(known) == ["second"]
    monkeypatch.setattr(geometry, "KEPT_HEADS", 4)
    geometry.known_or(lambda: geometry.bare(heads), "third", known)
    assert list(known) == ["second", "third"]


def test_another_torch_has_another_cache(
    llama: Path, prompts: Encoded, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(llama, prompts)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    numbers(llama, prompts)
    assert len(list(cache.iterdir())) == 2

"""A tiny checkpoint on disk, random and with nothing at a value that hides a mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from paging import llama_with_tokenizer

from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import Prompt, encode, limits
from duat_cli.loading.texts import PromptText

Encoded = Callable[..., list[Prompt]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 3 blocks."""
    return llama_with_tokenizer(
        tmp_path_factory.mktemp("checkpoint"), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return load(str(checkpoint))


@pytest.fixture(scope="session")
def prompts() -> Encoded:
    """The texts as prompts of a loaded model."""

    def make(loaded: LoadedModel, *texts: str) -> list[Prompt]:
        known = limits(loaded.model)
        tokenizer = load_tokenizer(Path(loaded.files.path))
        written = [PromptText(text, f"--prompt {k}", k) for k, text in enumerate(texts, 1)]
        return encode(tokenizer, written, None, known.max_positions, known.vocab_size)

    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what this test keeps."""
    monkeypatch.setenv("DUAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

"""Tokens counted before the load are those of the prompts that run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.lengths import token_counts
from duat_cli.loading.model.load import load_tokenizer
from duat_cli.loading.prompts import PromptText, default_prompts, encode


def test_as_many_as_the_model_reads() -> None:
    texts = default_prompts()
    encoded = encode(load_tokenizer(demo_path()), texts, None, None, 1 << 20)
    expected = [prompt.input_ids.shape[1] for prompt in encoded]
    assert token_counts(demo_path(), texts, None) == expected
    assert token_counts(demo_path(), texts, 7) == [min(count, 7) for count in expected]


def test_a_file_that_cannot_be_read_is_left_to_transformers(tmp_path: Path) -> None:
    shutil.copytree(demo_path(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        token_counts(tmp_path / "model", [PromptText("a", "--prompt 1", 1)], None)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        token_counts(tmp_path, [PromptText("a", "--prompt 1", 1)], None)

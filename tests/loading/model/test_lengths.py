"""Tokens counted before the load are those of the prompts that run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model import lengths
from duat_cli.loading.model.lengths import token_counter
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import PromptText, default_prompts, encode


def test_as_many_as_the_model_reads() -> None:
    texts = default_prompts()
    encoded = encode(load_tokenizer(demo_path()), texts, None, None, 1 << 20)
    expected = [prompt.input_ids.shape[1] for prompt in encoded]
    assert token_counter(demo_path(), None)(texts) == expected
    assert token_counter(demo_path(), 7)(texts) == [min(count, 7) for count in expected]


def test_the_tokenizer_is_read_once_and_for_no_text_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read, by_file = list[Path](), lengths._by_file
    monkeypatch.setattr(lengths, "_by_file", lambda path: (read.append(path), by_file(path))[1])
    counts, texts = token_counter(demo_path(), None), default_prompts()
    assert counts([]) == []
    assert not read
    assert counts(texts[:2]) + counts(texts[2:]) == counts(texts)
    assert len(read) == 1


def test_a_file_that_cannot_be_read_is_left_to_transformers(tmp_path: Path) -> None:
    shutil.copytree(demo_path(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        token_counter(tmp_path / "model", None)([PromptText("a", "--prompt 1", 1)])


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        token_counter(tmp_path, None)([PromptText("a", "--prompt 1", 1)])

"""The index of shards, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import bad_checkpoints as bad
from refusals import refusal_of_files


def test_no_weights_at_all(sound: Path) -> None:
    (sound / bad.W).rename(sound / "other.safetensors")
    assert "got 'other.safetensors'" in refusal_of_files(sound)
    (sound / "other.safetensors").unlink()
    assert "no weights: expected model.safetensors" in refusal_of_files(sound)


def test_a_pickle_behind_an_index(tmp_path: Path) -> None:
    bad.llama(tmp_path / "m", shards=True, tok=False)
    index = tmp_path / "m" / bad.IDX
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    index.write_text(json.dumps(content))
    assert "'pytorch_model.bin' is no safetensors file" in refusal_of_files(tmp_path / "m")


def test_a_tensor_that_only_the_index_knows(tmp_path: Path) -> None:
    bad.llama(tmp_path / "m", shards=True, tok=False)
    index = tmp_path / "m" / bad.IDX
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    assert "1 tensor missing from every shard: 'model.ghost'" in refusal_of_files(tmp_path / "m")

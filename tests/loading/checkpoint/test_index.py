"""The index of shards, and what it says of them; a tensor in several shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from refusals import refusal_of_files

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder

NORM = "model.norm.weight"


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


# -- a tensor in several shards: equal values are a warning, others are refused ----------------------------------


def held_twice(folder: Path, change: Callable[[Any], Any]) -> tuple[str, str]:
    """A checkpoint with one tensor in two shards, changed in the second; (the shard of the index, the other)."""
    from safetensors.torch import load_file

    bad.llama(folder, shards=True, tok=False)
    mapped = json.loads((folder / bad.IDX).read_text())["weight_map"][NORM]
    value = change(load_file(folder / mapped)[NORM])
    other = next(s for s in bad.shard_names(folder) if s != mapped)
    bad.wedit(folder, lambda s: {**s, NORM: value}, name=other)
    return mapped, other


def test_equal_values_in_two_shards_are_a_warning(tmp_path: Path) -> None:
    mapped, _ = held_twice(tmp_path / "m", lambda t: t)
    files = inspect_folder(tmp_path / "m")
    assert files.tensors[NORM].shard == mapped
    assert any(f"more than one shard: '{NORM}'; with equal values" in w for w in files.warnings)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("chunk", [1 << 20, 7])  # bytes; the tensor has 128
def test_other_values_in_two_shards_are_refused(
    at: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(tensor: Any) -> Any:
        tensor[at] += 1e-6
        return tensor

    monkeypatch.setattr("duat_cli.loading.checkpoint.index.CHUNK", chunk)
    mapped, other = held_twice(tmp_path / "m", moved)
    message = refusal_of_files(tmp_path / "m")
    assert f"'{NORM}' has other values in" in message
    assert mapped in message
    assert other in message


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_another_form_in_two_shards_is_refused(change: str, tmp_path: Path) -> None:
    import torch

    held_twice(tmp_path / "m", lambda t: t.reshape(4, 8) if change == "shape" else t.view(torch.int32))
    assert "has other values in" in refusal_of_files(tmp_path / "m")


def test_a_third_shard_is_compared_as_well(tmp_path: Path) -> None:
    """Entries are compared one with the next: any difference among the holders shows."""
    from duat_cli.loading.checkpoint.headers import TensorEntry
    from duat_cli.loading.checkpoint.index import require_equal

    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"Same")):
        (tmp_path / name).write_bytes(content)
    entries = [TensorEntry((1,), "F32", name, 4, 0) for name in "abc"]
    require_equal(tmp_path, "x", entries[:2])
    with pytest.raises(CheckpointError, match=r"b: tensor 'x' has other values in 'c'"):
        require_equal(tmp_path, "x", entries)

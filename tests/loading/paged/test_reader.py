"""Plain reads of tensors and rows against safetensors' own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from paging import saved
from safetensors.torch import load_file, save_file

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.paged.reader import Reader


def test_tensors_and_rows_are_those_of_the_file(tmp_path: Path) -> None:
    files = inspect_folder(saved("llama", tmp_path))
    known = load_file(tmp_path / files.shards[0])
    reader = Reader(files)
    found = reader.tensors(list(known))
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], known[name]) for name in known)
    assert reader.bytes_read == files.total_bytes
    name = "model.embed_tokens.weight"
    assert torch.equal(reader.rows(name, [3, 0, 3]), known[name][[3, 0, 3]])
    assert reader.bytes_read == files.total_bytes + 3 * known[name][0].numel() * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_every_stored_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    values = {"a": torch.arange(12).reshape(3, 4).to(dtype), "none": torch.zeros(0, 2, dtype=dtype)}
    save_file(load_file(tmp_path / "model.safetensors") | values, tmp_path / "model.safetensors")
    found = Reader(inspect_folder(tmp_path)).tensors(["none", "a"])
    assert all(found[name].dtype == dtype and torch.equal(found[name], values[name]) for name in values)


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    reader = Reader(inspect_folder(saved("llama", tmp_path)))
    reader.tensors(["model.norm.weight"])
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model.safetensors: changed since it was checked.*'model.norm.weight'"):
        reader.tensors(["model.norm.weight"])
    with pytest.raises(CheckpointError, match="changed since it was checked"):
        reader.rows("model.embed_tokens.weight", [0])


def test_each_tensor_is_read_where_it_is_indexed_and_no_thread_is_left(tmp_path: Path) -> None:
    files = inspect_folder(saved("llama", tmp_path))
    known = load_file(tmp_path / files.shards[0])
    with Reader(files) as reader:
        found = reader.each()
        assert reader.bytes_read == 0
        assert all(torch.equal(found[name][...], known[name]) for name in known)
        assert torch.equal(found["model.norm.weight"][:3], known["model.norm.weight"][:3])
        assert reader.tensors(list(known)).keys() == known.keys()  # several pieces, by threads
    assert not [one for one in threading.enumerate() if one.name.startswith("duat-piece")]
    with pytest.raises(RuntimeError):
        reader.tensors(list(known))
    with pytest.raises(ValueError, match="x"), Reader(files):
        raise ValueError("x")

"""Plain reads of tensors and rows against safetensors' own; weights that stay are read once, and no number changes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
from pathlib import Path
from unittest import mock

import bad_checkpoints as bad
import pytest
import torch
from paging import ids_of, outputs, pager_of, saved, whole
from quantising import quantise
from safetensors.torch import load_file, save_file

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder, single_file
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model import load
from duat_cli.loading.model.device_map import DeviceMap, Placed
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.loading.paged.layout import layout


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


def test_a_dtype_of_no_weight_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "f4.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"f4.safetensors: tensor 'x' cannot be read: stored as F4"):
        Reader(single_file(tmp_path / "f4.safetensors")).tensor("x")


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
@pytest.mark.parametrize("threads", [False, True])
def test_rows_of_any_shape_whether_or_not_threads_read(
    shape: tuple[int, ...], threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duat_cli.loading.checkpoint.reader.PIECE", 12)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"x": values}, tmp_path / "x.safetensors")
    with Reader(single_file(tmp_path / "x.safetensors"), threads=threads) as reader:
        assert reader.tensor("x").equal(values)
        assert reader.rows("x", range(3)).equal(values[:3])
        assert reader.rows("x", [4, 5, 1]).equal(values[[4, 5, 1]])


def test_rows_of_a_quantised_weight(tmp_path: Path) -> None:
    bad.llama(tmp_path, dtype="bfloat16", intermediate_size=96, hidden_size=64)
    reader, name = Reader(inspect_folder(quantise(tmp_path, "nf4"))), "model.layers.0.mlp.up_proj.weight"
    assert reader.rows(name, range(2, 5)).equal(reader.tensor(name)[2:5])


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
    with Reader(files, threads=True) as reader:
        found = reader.each()
        assert reader.bytes_read == 0
        assert all(torch.equal(found[name][...], known[name]) for name in known)
        assert torch.equal(found["model.norm.weight"][:3], known["model.norm.weight"][:3])
        assert reader.tensors(list(known)).keys() == known.keys()  # several pieces, by threads
    assert not [one for one in threading.enumerate() if one.name.startswith("duat-piece")]
    with pytest.raises(RuntimeError):
        reader.tensors(list(known))
    with pytest.raises(ValueError, match="x"), Reader(files, threads=True):
        raise ValueError("x")


PASSES = 3


def placed(folder: Path, places: dict[str, str], dtype: str) -> LoadedModel:
    file = folder / "map.json"
    file.write_text(json.dumps(places))
    room = Placed(DeviceMap.of(str(file)), {"cpu": float(1 << 40)})
    with mock.patch.object(load, "layout", functools.partial(layout, kept=0)):  # even tiny embeddings are pages
        return load_files(Source(folder, "t", None), inspect_folder(folder), dtype=dtype, paged=True, placed=room)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_and_fingerprint_are_the_models(model_type: str, dtype: str, tmp_path: Path) -> None:
    known = whole(saved(model_type, tmp_path), dtype)
    block = next(name for name, _ in known.model.named_modules() if name.endswith(".1"))
    loaded = placed(tmp_path, {"": "cpu", block: "disk"}, dtype)
    ids = ids_of(known)
    for _ in range(PASSES):
        assert torch.equal(outputs(loaded.model, ids), outputs(known.model, ids))
    assert loaded.paged is not None
    assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)


def test_only_what_is_on_disk_is_read_again(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    files = inspect_folder(tmp_path)
    loaded = placed(tmp_path, {"": "cpu", "model.layers.1": "disk"}, "float32")
    ids, pager = ids_of(loaded), pager_of(loaded)
    read = []
    for _ in range(PASSES):
        outputs(loaded.model, ids)
        read.append(pager.bytes_read)
    again = sum(t.bytes for name, t in files.tensors.items() if name.startswith("model.layers.1."))
    assert 0 < again < files.total_bytes / 2
    assert [later - before for before, later in itertools.pairwise(read)] == [again] * (PASSES - 1)
    assert loaded.paged is not None
    frame = sum(files.tensors[name].bytes for name in pager.pages[0].tensors)
    assert loaded.paged.kept == files.total_bytes - again - frame


def test_rows_come_from_what_is_kept(tmp_path: Path) -> None:
    files, name, other = inspect_folder(saved("llama", tmp_path)), "model.embed_tokens.weight", "model.norm.weight"
    plain, kept = Reader(files), Reader(files, {name: "cpu"})
    assert kept.rows(name, [2, 0]).equal(plain.rows(name, [2, 0]))
    assert kept.bytes_read == files.tensors[name].bytes
    for read in (1, 2):
        assert list(kept.tensors([name, other])) == [name, other]
        assert list(kept.tensors([other, name])) == [other, name]
        assert kept.bytes_read == files.tensors[name].bytes + 2 * read * files.tensors[other].bytes

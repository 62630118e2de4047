"""Weights that stay are read once, others in every pass, and no number changes."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from paging import ids_of, outputs, pager_of, saved, whole

from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model import load
from duat_cli.loading.model.device_map import DeviceMap, Placed
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.loading.paged.kept import Kept
from duat_cli.loading.paged.layout import layout

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


class Told:
    """A source whose tensors are told, and what was asked of it."""

    bytes_read = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        self.asked += names
        self.bytes_read += len(names)
        return {name: torch.arange(6.0).reshape(3, 2) for name in names}

    def rows(self, name: str, rows: list[int]) -> torch.Tensor:
        self.asked.append(f"rows of {name}")
        return torch.arange(6.0).reshape(3, 2)[rows]


def test_rows_come_from_what_is_kept() -> None:
    source = Told()
    kept = Kept(source, {"a": "cpu"})
    assert kept.rows("b", [2, 0]).equal(kept.rows("a", [2, 0]))
    assert list(kept.tensors(["a", "b"])) == ["a", "b"]
    assert list(kept.tensors(["b", "a"])) == ["b", "a"]
    assert source.asked == ["rows of b", "a", "b", "b"]
    assert kept.bytes_read == 3

"""The cache on disk: it gives back what was put, and a cache that fails is no error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duat_cli.cache.tensors import TensorCache, cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def filled(key: str = "k") -> TensorCache:
    cache = TensorCache(key)
    cache.put("a", torch.arange(6, dtype=torch.float64).reshape(2, 3))
    cache.put("b", torch.full((2,), 0.1))
    cache.save()
    return cache


def test_a_saved_tensor_comes_back_to_the_bit(folder: Path) -> None:
    filled()
    again = TensorCache("k")
    a, b = again.get("a"), again.get("b")
    assert a is not None
    assert b is not None
    assert a.dtype == torch.float64
    assert torch.equal(a, torch.arange(6, dtype=torch.float64).reshape(2, 3))
    assert torch.equal(b, torch.full((2,), 0.1))
    assert again.get("c") is None


def test_views_and_gradients_are_stored_as_plain_tensors(folder: Path) -> None:
    cache = TensorCache("k")
    cache.put("view", torch.arange(6.0, requires_grad=True).reshape(2, 3).T)
    cache.save()
    view = TensorCache("k").get("view")
    assert view is not None
    assert view.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_another_key_knows_nothing(folder: Path) -> None:
    filled("one")
    assert TensorCache("two").get("a") is None


def test_it_is_one_file_a_key_and_no_leftovers(folder: Path) -> None:
    filled("one")
    filled("two")
    assert sorted(f.name for f in folder.iterdir()) == ["gram-4-one.safetensors", "gram-4-two.safetensors"]


def test_a_second_save_adds(folder: Path) -> None:
    filled()
    cache = TensorCache("k")
    cache.put("c", torch.zeros(1))
    cache.save()
    again = TensorCache("k")
    assert [again.get(n) is not None for n in "abc"] == [True, True, True]


def test_nothing_new_is_not_written_again(folder: Path) -> None:
    filled()
    file = next(folder.iterdir())
    before = file.stat().st_mtime_ns
    TensorCache("k").save()
    assert file.stat().st_mtime_ns == before


def test_a_disabled_cache_neither_reads_nor_writes(folder: Path) -> None:
    filled()
    cache = TensorCache("k", enabled=False)
    assert cache.get("a") is None
    other = TensorCache("other", enabled=False)
    other.put("a", torch.zeros(1))
    other.save()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\xff" * 64, b'\x10\0\0\0\0\0\0\0{"a": 1}       '])
def test_a_broken_file_is_no_cache_and_is_replaced(folder: Path, content: bytes) -> None:
    filled()
    file = next(folder.iterdir())
    file.write_bytes(content)
    assert TensorCache("k").get("a") is None
    filled()
    assert TensorCache("k").get("a") is not None


def test_a_truncated_file_is_no_cache(folder: Path) -> None:
    filled()
    file = next(folder.iterdir())
    file.write_bytes(file.read_bytes()[:-8])
    assert TensorCache("k").get("a") is None


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("DUAT_CACHE", str(blocked / "below"))
    filled()
    assert TensorCache("k").get("a") is None
    assert blocked.read_text() == "no folder"


def test_a_failed_write_leaves_the_old_file_and_no_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    before = next(folder.iterdir()).read_bytes()

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("duat_cli.cache.tensors.save_file", full)
    cache = TensorCache("k")
    cache.put("c", torch.zeros(1))
    cache.save()
    assert [f.read_bytes() for f in folder.iterdir()] == [before]


def test_the_folder_is_the_users_cache_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUAT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("DUAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "duat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "duat"

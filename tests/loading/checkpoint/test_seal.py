"""A weight file that changes between the pre-flight and its reading is refused, by file and tensor, by every reader."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import bad_checkpoints as bad
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora.weights.change import adapter_tensors
from duat_cli.checks.weights import weight_facts
from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import ADAPTER_WEIGHTS, open_adapter
from duat_cli.loading.checkpoint import reader as reader_module
from duat_cli.loading.checkpoint import stream
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, inspect_folder
from duat_cli.loading.checkpoint.reader import Reader, Unread
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import load_files

NAME = "model.layers.0.mlp.up_proj.weight"


def replaced(file: Path) -> None:
    """Another file of the same size and header takes its place."""
    tensors = load_file(file)
    tensors[NAME] = tensors[NAME] + 1
    save_file(tensors, file.with_suffix(".new"), metadata={"format": "pt"})
    os.replace(file.with_suffix(".new"), file)


def rewritten(file: Path) -> None:
    """In place, one byte of the data."""
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x01")


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grown(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


def removed(file: Path) -> None:
    file.unlink()


def reheaded(file: Path) -> None:
    """Two tensors of one shape change their names in the header; size and time stay as they were."""
    before, content = file.stat(), file.read_bytes()
    one, other = NAME.encode(), NAME.replace("layers.0", "layers.1").encode()
    at, then = sorted(content.index(name) for name in (one, other))
    a, b, n = content[at : at + len(one)], content[then : then + len(one)], len(one)
    file.write_bytes(content[:at] + b + content[at + n : then] + a + content[then + n :])
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


FAULTS: dict[Callable[[Path], None], str] = {
    replaced: "modification time",
    rewritten: "modification time",
    truncated: "shorter",
    grown: "longer",
    removed: "cannot be read any more",
    reheaded: "header is another",
}


def base_weights(files: CheckpointFiles) -> None:
    with BaseWeights(Source(files.path, "base", None), files) as base:
        place = base.find(NAME)
        assert place is not None
        base.read(place)


READERS: dict[str, Callable[[CheckpointFiles], Any]] = {
    "model": lambda files: load_files(Source(files.path, "m", None), files),
    "check": lambda files: weight_facts(files, lambda *_: None),
    "base": base_weights,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m", tok=False)
    file = tmp_path / "m" / bad.W
    os.utime(file, ns=(10**18, 10**18))  # long ago: a change within one tick of the clock shows as well
    return tmp_path / "m"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_shard_that_changes_before_it_is_read(reader: str, fault: Callable[[Path], None], folder: Path) -> None:
    files = inspect_folder(folder)
    READERS[reader](files)
    fault(folder / bad.W)
    with pytest.raises(CheckpointError, match=r"changed since it was checked.*tensor '\S+'") as caught:
        READERS[reader](files)
    assert bad.W in str(caught.value)
    assert FAULTS[fault] in str(caught.value)


@pytest.mark.parametrize("fault", [replaced, rewritten, truncated, removed], ids=lambda fault: fault.__name__)
def test_a_shard_that_changes_while_the_model_is_loaded(
    fault: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the listing of its tensors: the one that is being read then is named."""
    files, real = inspect_folder(folder), Reader.each

    def listing(self: Reader) -> dict[str, Unread]:
        found = real(self)
        fault(folder / bad.W)
        return found

    monkeypatch.setattr(Reader, "each", listing)
    with pytest.raises(CheckpointError, match="changed since it was checked") as caught:
        READERS["model"](files)
    assert any(f"tensor '{name}'" in str(caught.value) for name in files.tensors)
    assert "LlamaForCausalLM" not in str(caught.value)


@pytest.mark.parametrize("fault", [rewritten, truncated, removed], ids=lambda fault: fault.__name__)
def test_a_shard_that_changes_while_it_is_open(fault: Callable[[Path], None], folder: Path) -> None:
    files = inspect_folder(folder)
    with BaseWeights(Source(folder, "base", None), files) as base:
        place = base.find(NAME)
        assert place is not None
        base.read(place)
        fault(folder / bad.W)
        with pytest.raises(CheckpointError, match=f"{bad.W}: changed since it was checked.*'{NAME}'"):
            base.read(place)


def test_a_change_within_the_read_of_a_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read then is thrown away: a stream looks again behind every piece, a reader behind every tensor."""
    files, read = inspect_folder(folder), stream.read_into

    def then_rewritten(path: Path, *rest: Any) -> None:
        read(path, *rest)
        rewritten(path)

    for module in (stream, reader_module):
        monkeypatch.setattr(module, "read_into", then_rewritten)
    with pytest.raises(CheckpointError, match=r"modification time is another\); tensor '\S+' is not read"):
        READERS["check"](files)
    os.utime(folder / bad.W, ns=(10**18, 10**18))
    files = inspect_folder(folder)
    with pytest.raises(CheckpointError, match=rf"modification time is another\); tensor '{NAME}' is not read"):
        READERS["base"](files)


@pytest.mark.parametrize("reader", READERS)
def test_a_read_that_fails_by_itself_names_file_and_tensor(
    reader: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def seek(self, offset: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    files, read = inspect_folder(folder), stream.read_into
    for module in (stream, reader_module):
        monkeypatch.setattr(module, "read_into", lambda path, file, *rest: read(path, Broken(), *rest))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=rf"{bad.W}: tensor '\S+' cannot be read: {os.strerror(errno.EIO)}"):
        READERS[reader](files)


def test_an_adapter_is_sealed_as_well(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "a", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    files = open_adapter(adapter, "a")
    first = next(iter(files.tensors))
    read = adapter_tensors(files)
    assert isinstance(read(first), torch.Tensor)
    truncated(adapter / ADAPTER_WEIGHTS)
    for reading in (read, adapter_tensors(files)):
        with pytest.raises(CheckpointError, match=f"{ADAPTER_WEIGHTS}: changed since it was checked"):
            reading(first)


def test_a_file_that_nobody_touches_is_read_again_and_again(folder: Path) -> None:
    files = inspect_folder(folder)
    os.utime(folder / bad.W, ns=(10**18 + 5, 10**18))  # read, which is no change
    for reader in READERS.values():
        reader(files)
        reader(files)

"""Tensors as they are stored: safetensors' dtypes as torch's, and the files open for reading; quantised weights as they
are computed from what is stored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duat_cli.compat.safetensors import open_read
from duat_cli.loading.checkpoint.dequantised import pieces
from duat_cli.loading.checkpoint.dtypes import STORED_FLOATS, most_stored_name
from duat_cli.loading.checkpoint.files import fail
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.seal import Seal, require_unchanged
from duat_cli.loading.quiet import described, foreign_errors
from duat_cli.text import clean, shown

# safetensors' names, for tensors without memory; every dtype that inspect_folder lets through
STORED = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "C64": torch.complex64,
    **{name: getattr(torch, dtype) for name, dtype in STORED_FLOATS.items()},
}  # fmt: skip


def most_stored(files: CheckpointFiles) -> torch.dtype | None:
    """The floating-point dtype of most of the checkpoint's bytes; None if it holds none."""
    name = most_stored_name(files)
    return None if name is None else getattr(torch, name)


def dequantised_tensor(path: Path, seals: Mapping[str, Seal], name: str, entry: TensorEntry) -> Tensor:
    """A quantised weight, computed from what the files hold."""
    found = torch.empty(entry.shape, dtype=STORED[entry.dtype])
    flat = found.reshape(-1, entry.shape[-1])
    for start, values in pieces(path, seals, name, entry):
        flat[start : start + len(values)] = torch.from_numpy(values)
    return found


class StoredTensors:
    """One safetensors file, open, that refuses to be read once it is no longer the file that was checked.

    Quantised weights whose values begin in it are read by their names as well.
    """

    def __init__(self, path: Path, seal: Seal, opened: Any) -> None:
        self._path, self._seal, self._opened = path, seal, opened
        self.made: Mapping[str, Callable[[], Tensor]] = {}
        """What computes them."""

    def get_tensor(self, name: str) -> Tensor:
        if name in self.made:
            return self.made[name]()
        with self.reading(name):
            return self._opened.get_tensor(name)

    def get_part(self, name: str, at: Any) -> Tensor:
        """What is indexed of a tensor that holds something; a quantised weight is computed as a whole."""
        if name in self.made:
            return self.made[name]()[at]
        with self.reading(name):
            return self._opened.get_slice(name)[at]

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Around a read of this tensor: what fails, or changes meanwhile, is said by file and tensor."""
        require_unchanged(self._path, self._seal, name)
        try:
            yield
        except Exception as error:
            require_unchanged(self._path, self._seal, name)
            fail(self._path, f"tensor {shown(name)} cannot be read: {described(error)}")
        require_unchanged(self._path, self._seal, name)


@contextlib.contextmanager
def readers(files: CheckpointFiles) -> Iterator[dict[str, StoredTensors]]:
    """Shard -> open safetensors file."""
    first: dict[str, str] = {}
    made: dict[str, dict[str, Callable[[], Tensor]]] = {}
    for name, entry in files.tensors.items():
        first.setdefault(entry.shard, name)
        if entry.made is not None:
            make = functools.partial(dequantised_tensor, files.path, files.seals, name, entry)
            made.setdefault(entry.shard, {})[name] = make
    with contextlib.ExitStack() as stack:
        found = {
            shard: stack.enter_context(open_tensors(files.path / shard, files.seals[shard], first.get(shard)))
            for shard in files.shards
        }
        for shard, makes in made.items():
            found[shard].made = makes
        yield found


@contextlib.contextmanager
def open_tensors(path: Path, seal: Seal, first: str | None) -> Iterator[StoredTensors]:
    """One safetensors file, open, as it was sealed. first: a tensor of it, for the message if it is not."""
    require_unchanged(path, seal, first, header=True)
    what = "" if first is None else f"tensor {shown(first)} "
    with foreign_errors(f"{clean(str(path))}: {what}cannot be read"):
        opened = open_read(path)
    with opened:
        require_unchanged(path, seal, first, header=True)  # the very file that is open now
        yield StoredTensors(path, seal, opened)

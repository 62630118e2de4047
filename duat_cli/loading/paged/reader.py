"""Tensors of the files by plain reads, in their stored dtype, in the order of the files.

Quantised weights come as the numbers that their format's formula gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from duat_cli.loading.checkpoint.files import open_file, read_into
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.seal import require_unchanged
from duat_cli.loading.checkpoint.stored import STORED, dequantised_tensor
from duat_cli.loading.wording import shown


class Reader:
    """Reads tensors of a checkpoint; counts the bytes. CheckpointError where a file is not what was checked."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self.bytes_read = 0
        self._checked: set[str] = set()  # shards whose header was read again

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, whole."""
        entries = self._files.tensors
        found = {}
        for shard in dict.fromkeys(entries[name].shard for name in names):
            inside = sorted((n for n in names if entries[n].shard == shard), key=lambda n: entries[n].offset)
            path = self._sealed(shard, inside[0])
            with open_file(path) as file:
                for name in inside:
                    if entries[name].made is None:
                        found[name] = self._tensor(path, file, name, entries[name])
                    else:
                        found[name] = dequantised_tensor(self._files.path, self._files.seals, name, entries[name])
                        self.bytes_read += entries[name].bytes
            self._sealed(shard, inside[-1])
        return found

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix that is stored as it is, (rows, columns)."""
        entry = self._files.tensors[name]
        height, width = entry.shape
        found = torch.empty(len(rows), width, dtype=STORED[entry.dtype])
        path, size = self._sealed(entry.shard, name), entry.bytes // height
        with open_file(path) as file:
            for place, row in enumerate(rows):
                self._fill(path, file, entry.offset + row * size, found[place], name)
        self._sealed(entry.shard, name)
        return found

    def _sealed(self, shard: str, name: str) -> Path:
        path = self._files.path / shard
        require_unchanged(path, self._files.seals[shard], name, header=shard not in self._checked)
        self._checked.add(shard)
        return path

    def _tensor(self, path: Path, file: BinaryIO, name: str, entry: TensorEntry) -> Tensor:
        found = torch.empty(entry.shape, dtype=STORED[entry.dtype])
        if entry.elements:
            self._fill(path, file, entry.offset, found, name)
        return found

    def _fill(self, path: Path, file: BinaryIO, offset: int, found: Tensor, name: str) -> None:
        view = found.reshape(-1).view(torch.uint8).numpy().data
        read_into(path, file, offset, view, shown(name))
        self.bytes_read += len(view)

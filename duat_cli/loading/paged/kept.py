"""Weights that stay in the memory of some device once they have been read from the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from duat_cli.loading.paged.pager import Source


class Kept:
    """Tensors of another source, some of which are asked for there once alone."""

    def __init__(self, source: Source, homes: Mapping[str, str]) -> None:
        """homes: tensor -> the device that keeps it, in its stored dtype."""
        self._source, self._homes = source, homes
        self._held: dict[str, Tensor] = {}
        self.bytes_read = source.bytes_read

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, whole."""
        read = self._source.tensors([name for name in names if name not in self._held])
        self.bytes_read = self._source.bytes_read
        for name, tensor in read.items():
            if name in self._homes:
                self._held[name] = tensor.to(self._homes[name])
        return {name: self._held[name] if name in self._held else read[name] for name in names}

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, (rows, columns)."""
        if name not in self._homes:
            found = self._source.rows(name, rows)
            self.bytes_read = self._source.bytes_read
            return found
        held = self.tensors([name])[name]
        return held[torch.tensor(list(rows), dtype=torch.long, device=held.device)]

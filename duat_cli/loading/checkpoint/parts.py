"""The tensors of a checkpoint that are in memory together when it is read in parts, found by names and sizes alone.

`loading/paged/layout.py` does this with the model's modules, once they exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles

FRAME_BYTES = 64 << 20  # bytes; a layer outside of blocks of at most this size is part of the frame
ROWS_BYTES = 16 << 20  # bytes of a piece in which a large matrix is looked through
_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """Tensors that go into memory and out of it together."""

    name: str
    tensors: Mapping[str, TensorEntry]

    @property
    def stored(self) -> int:
        """Bytes in the files."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def read(self) -> int:
        """Bytes in memory as they are read: quantised weights count with their computed values."""
        return sum(tensor.read_bytes for tensor in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())


@dataclass(frozen=True)
class Parts:
    """All tensors of a checkpoint."""

    frame: Part
    """The tensors that stay in memory."""
    layers: tuple[Part, ...]
    """Large layers outside of blocks: embeddings and heads."""
    blocks: tuple[Part, ...]
    """Blocks, by the first number in the tensors' names: model.layers.3."""


def parts_of(files: CheckpointFiles, element_bytes: int) -> Parts:
    """The parts of a checkpoint. element_bytes: bytes of one weight in memory."""
    blocks: dict[str, dict[str, TensorEntry]] = {}
    layers: list[Part] = []
    frame: dict[str, TensorEntry] = {}
    for name, tensor in files.tensors.items():
        numbered = _NUMBERED.match(name)
        if numbered:
            blocks.setdefault(numbered[0], {})[name] = tensor
        elif len(tensor.shape) == 2 and tensor.elements * element_bytes > FRAME_BYTES:
            layers.append(Part(name, {name: tensor}))
        else:
            frame[name] = tensor
    return Parts(Part("", frame), tuple(layers), tuple(Part(name, found) for name, found in blocks.items()))

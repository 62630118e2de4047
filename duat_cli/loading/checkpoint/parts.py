"""Which tensors of a checkpoint are in memory together when it is read in parts: told by names and sizes alone.

`loading/paged/layout.py` tells it of the model's modules, once they exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles

FRAME_BYTES = 64 << 20  # of a layer outside of blocks: up to here it is part of the frame
ROWS_BYTES = 16 << 20  # of a matrix that is looked through in pieces
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
        """Bytes in memory, as they are read: quantised weights as their values."""
        return sum(tensor.read_bytes for tensor in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())


@dataclass(frozen=True)
class Parts:
    """All tensors of a checkpoint."""

    frame: Part
    """What stays."""
    layers: tuple[Part, ...]
    """Large layers outside of blocks: embeddings and heads."""
    blocks: tuple[Part, ...]
    """By the first number in the tensors' names: model.layers.3."""


def parts_of(files: CheckpointFiles, element_bytes: int) -> Parts:
    """The parts of a checkpoint. element_bytes: of a weight in memory."""
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

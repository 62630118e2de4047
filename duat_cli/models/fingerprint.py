"""Content hashes: which weights a report is about, and whether two tensors are the same to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.checkpoint import shown

_CHUNK = 1 << 22  # elements copied off the device at a time


def fingerprint(model: nn.Module) -> str:
    """sha256 (hex) over name, shape, dtype and bytes of all parameters and saved buffers, sorted by name.

    Tied parameters count once, under their first name. The weights are those in memory: the same file loaded
    as another dtype has another fingerprint. UnsupportedModelError for weights that are not in memory.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(_saved(model)):
        if tensor.is_meta:
            raise UnsupportedModelError(f"{shown(name)} is not in memory (meta tensor): no fingerprint")
        _add(total, name, tensor)
    return total.hexdigest()


def digest(*tensors: Tensor) -> str:
    """sha256 (hex) over shape, dtype and bytes of tensors, in order."""
    total = hashlib.sha256()
    for tensor in tensors:
        _add(total, "", tensor)
    return total.hexdigest()


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; what a module computes for itself is no part of the checkpoint."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _add(total: hashlib._Hash, name: str, tensor: Tensor) -> None:
    total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode("utf-8", "surrogatepass"))
    for chunk in _bytes(tensor):
        total.update(chunk)


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The values in row-major order; bfloat16 has no numpy dtype, its bytes have."""
    for piece in tensor.detach().reshape(-1).split(_CHUNK):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())

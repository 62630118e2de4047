"""A content hash: it says which weights a report is about, and whose Gram matrices the cache holds.

It is made for speed, not against an attacker: 1.8 GB/s a core, sha256 0.4, and computed on the device that holds the
weights. Each row of 8192 words w_i of 32 bits becomes one number,

    h(w) = sum_i k_i w_i  mod 2^64,    k_i fixed, odd, 64 bits from SHAKE-256,

multilinear hashing (Carter and Wegman 1979; Lemire and Kaser, arXiv:1202.4961). One changed word always changes h, as
|w - w'| < 2^32 and k_i is odd; any other change of a row is missed for a share of about 2^-32 of all k. sha256 then
takes the numbers of all rows, and the bytes behind the last full row as they are. The hash is not cryptographic: the
k_i are known, so weights can be made to collide. Where that must be excluded, hash the files.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import unsaved_buffers
from duat_cli.errors import UnsupportedModelError
from duat_cli.text import shown

_WORDS = 8192  # a row: 32 KiB
_WORD = 4  # bytes
_ROWS = 32  # rows at a time; they fit a core's cache
_ROWS_GPU = 1024  # 32 MiB: larger pieces, because the CPU waits for each


def fingerprint(model: nn.Module) -> str:
    """64 hex digits over name, shape, dtype and bytes of all parameters and saved buffers, sorted by name.

    Tied parameters count once, under their first name. The weights are those in memory: the same file loaded
    as another dtype has another fingerprint. UnsupportedModelError for weights that are not in memory.
    """
    return combined({name: digest(name, tensor) for name, tensor in saved(model)})


def digest(name: str, tensor: Tensor) -> bytes:
    """Digest of one parameter or buffer, 32 bytes; its name is for the message alone."""
    if tensor.is_meta:
        raise UnsupportedModelError(f"{shown(name)} is not in memory (meta tensor): no fingerprint")
    found: dict[str, bytes] = {}
    whole = Digest(name, tensor, found)
    whole.add(tensor.detach())
    whole.done()
    return found[name]


class Digest:
    """Digest of one parameter or buffer whose values come in pieces, in row-major order."""

    def __init__(self, name: str, like: Tensor, into: dict[str, bytes]) -> None:
        """like: a tensor of its shape and dtype; into: where its digest is stored, under its name."""
        self._name, self._into = name, into
        self._total = hashlib.sha256(f"{tuple(like.shape)}\0{like.dtype}\0".encode())
        self._rest: Tensor | None = None  # the bytes behind the last full row

    def add(self, piece: Tensor) -> None:
        flat = piece.reshape(-1).contiguous().view(torch.uint8)
        rows, rest = _rows(flat if self._rest is None else torch.cat([self._rest, flat]))
        for part in rows.split(_ROWS if rows.device.type == "cpu" else _ROWS_GPU):
            self._total.update(_bytes(row_sums(part)))
        self._rest = rest.clone() if len(rest) else None  # a copy, so that the piece can be freed

    def done(self) -> None:
        if self._rest is not None:
            self._total.update(_bytes(self._rest))
        self._into[self._name] = self._total.digest()


def combined(digests: Mapping[str, bytes]) -> str:
    """The fingerprint, 64 hex digits, from the digests of all tensors."""
    total = hashlib.sha256(b"duat fingerprint 3\0")
    for name in sorted(digests):
        total.update(name.encode("utf-8", "surrogatepass") + b"\0" + digests[name])
    return total.hexdigest()


def row_sums(rows: Tensor) -> Tensor:
    """sum_i k_i w_i mod 2^64 of each row: (n, words) int32 -> (n,) int64, whose arithmetic wraps around."""
    return rows.to(torch.int64).mul_(_keys(rows.device)).sum(1)


@functools.cache
def _keys(device: torch.device) -> Tensor:  # (words,), int64, odd
    raw = hashlib.shake_256(b"duat fingerprint").digest(8 * _WORDS)
    return (torch.frombuffer(bytearray(raw), dtype=torch.int64) | 1).to(device)


def saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers. Buffers that a module computes for itself are no part of the checkpoint."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in unsaved_buffers(module):
                yield name, buffer


def _rows(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Splits bytes, uint8, into full rows of words, (n, words) int32, and the bytes behind them."""
    if flat.storage_offset() % _WORD:  # a slice may start between two words
        flat = flat.clone()
    full = flat.numel() // (_WORD * _WORDS) * (_WORD * _WORDS)
    return flat[:full].view(torch.int32).reshape(-1, _WORDS), flat[full:]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data

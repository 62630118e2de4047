"""The header of one safetensors file: its tensors, with every size and offset checked. No weight is read."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from duat_cli.loading.checkpoint.files import fail, kind, open_file, refuse_pointer
from duat_cli.loading.checkpoint.seal import Seal, seal_of
from duat_cli.text import clean, shown

if TYPE_CHECKING:
    from duat_cli.loading.quantised.formula import Formula

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

# bits an element, by safetensors' own names
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, as a safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: F32, BF16, I64."""
    shard: str
    """File that holds it, relative to the folder."""
    bytes: int
    offset: int
    """Offset of its first byte from the file's start."""
    made: Made | None = None
    """The stored tensors of a quantised weight, else None. The weight's shape and dtype are those of the result, its
    shard and offset those of the first stored tensor, and its bytes those of all stored tensors."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def read_bytes(self) -> int:
        """Bytes in memory as it is read: a quantised weight counts with its computed values."""
        return self.bytes if self.made is None else self.elements * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class Made:
    """A weight that is computed from stored tensors."""

    formula: Formula
    parts: Mapping[str, TensorEntry]
    """Role -> stored tensor."""


def read_header(path: Path, shard: str) -> tuple[dict[str, TensorEntry], Seal]:
    """The tensors of one safetensors file, and its seal. Only the header is read, and every offset is checked.

    Format: 8 bytes header length (little endian), a JSON header, then the data without gaps.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        refuse_pointer(path, start + file.read(512))
        length = _header_length(path, start, size)
        file.seek(8)
        raw = file.read(length)
        seal = seal_of(file, 8 + length)
    header = _parse_header(path, raw)
    ranges = []
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            _check_metadata(path, value)
            continue
        entries[name], low, high = _entry(path, name, value, shard, 8 + length)
        ranges.append((low, high, name))
    _check_layout(path, sorted(ranges), 8 + length, size)
    return entries, seal


def _header_length(path: Path, start: bytes, size: int) -> int:
    if size == 0:
        fail(path, "is empty (0 bytes): fetch it again")
    if size < 8:
        fail(path, f"too small for a safetensors header: {size} bytes; truncated?")
    length = int.from_bytes(start, "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        foreign = f"no safetensors file; it begins with {start!r}{_looks_like(start)}"
        cause = "truncated?" if length <= _MAX_HEADER_BYTES else foreign
        fail(path, f"header length field says {length} bytes, the file has {size}: {cause}")
    return length


def _looks_like(start: bytes) -> str:
    """The format that the file seems to have, by its first bytes."""
    if start.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return ", as a pickle of torch.save does, which duat never opens: convert it to safetensors"
    return ", as a GGUF file does" if start.startswith(b"GGUF") else ""


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        fail(path, f"header: expected a JSON object, which begins with '{{'; got {raw[:8]!r}; corrupt?")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        fail(path, f"header is not UTF-8: byte 0x{raw[error.start]:02x} at offset {8 + error.start}")
    except (ValueError, RecursionError) as error:
        fail(path, f"header is not JSON: {clean(str(error))}; corrupt?")
    if not isinstance(header, dict):
        fail(path, f"header: expected a JSON object, got {type(header).__name__}")
    return header


def _check_metadata(path: Path, value: object) -> None:
    """Checks that the metadata are texts by name, as the format demands; readers refuse anything else."""
    if not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        fail(path, f"header: __metadata__: expected texts by name, got {shown(value)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of the pairs; ValueError for equal keys. Python keeps the last of them, other readers the first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {shown(twice)} stands twice")
    return found


def _entry(path: Path, name: str, value: object, shard: str, start: int) -> tuple[TensorEntry, int, int]:
    """One tensor, and the low and high end of its byte range, checked against its shape and dtype. start: offset of the
    data."""
    place = f"header: tensor {shown(name)}"
    if not isinstance(value, dict):
        fail(path, f"{place}: expected an object, got {kind(value)}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        fail(path, f"{place}: dtype {shown(dtype)} is unknown")
    if not _are_sizes(shape):
        fail(path, f"{place}: shape {shown(shape)} is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(path, f"{place}: data_offsets {shown(offsets)} are no byte range")
    low, high = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (high - low):
        fail(path, f"{place}: shape {shape} of {dtype} takes {-(-bits // 8)} bytes, "
                    f"data_offsets hold {high - low}")  # fmt: skip
    return TensorEntry(tuple(shape), dtype, shard, high - low, start + low), low, high


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(path: Path, ranges: list[tuple[int, int, str]], start: int, size: int) -> None:
    """Checks that the tensors lie side by side, from the header's end to the file's end."""
    end = 0
    for low, high, name in ranges:
        if low != end:
            fault = "overlaps its neighbour" if low < end else "leaves a hole before it"
            fail(path, f"header: tensor {shown(name)} {fault}: data_offsets start at {low}, expected {end}")
        end = high
    if size < start + end:
        fail(path, f"file has {size} bytes, header covers {start + end}: truncated? Fetch it again")
    if size > start + end:
        fail(path, f"{size - start - end} trailing bytes: file has {size}, header covers {start + end}")

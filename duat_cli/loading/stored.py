"""Tensors as they are stored: safetensors' dtypes as torch's, and the files open for reading."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from duat_cli.loading.checkpoint import CheckpointFiles

# safetensors' names, for tensors without memory; every dtype that inspect_folder lets through
STORED = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    # these only of empty tensors, which real checkpoints hold as markers
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def most_stored(files: CheckpointFiles) -> torch.dtype | None:
    """The floating-point dtype of most of the checkpoint's bytes; None if it holds none."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in files.tensors.values():
        if entry.elements and STORED[entry.dtype].is_floating_point:
            sizes[STORED[entry.dtype]] += entry.bytes
    return sizes.most_common(1)[0][0] if sizes else None


@contextlib.contextmanager
def readers(files: CheckpointFiles) -> Iterator[dict[str, Any]]:
    """Shard -> open safetensors file."""
    with contextlib.ExitStack() as stack:
        yield {shard: stack.enter_context(open_tensors(files.path / shard)) for shard in files.shards}


def open_tensors(path: Path) -> Any:
    """One safetensors file, open. It is read, not mapped: a mapped file that shrinks kills the process with SIGBUS."""
    try:
        return safe_open(str(path), framework="pt", backend="pread")
    except TypeError:  # safetensors < 0.8 can only map
        return safe_open(str(path), framework="pt")

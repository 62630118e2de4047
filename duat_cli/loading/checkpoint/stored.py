"""Dtypes of stored tensors: safetensors' as torch's."""

from __future__ import annotations

import torch

from duat_cli.loading.checkpoint.dtypes import STORED_FLOATS, most_stored_name
from duat_cli.loading.checkpoint.preflight import CheckpointFiles

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

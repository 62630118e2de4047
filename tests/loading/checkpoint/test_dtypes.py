"""What `--dtype auto` means without torch: what is stated, else what most bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duat_cli.loading.checkpoint.dtypes import auto_dtype, most_stored_name
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles


def files(config: dict[str, Any], **sizes: int) -> CheckpointFiles:
    """sizes: elements of a tensor of each dtype."""
    bits = {"F64": 64, "F32": 32, "BF16": 16, "I64": 64, "F8_E4M3": 8}
    tensors = {name: TensorEntry((n,), name, "a", n * bits[name] // 8, 0) for name, n in sizes.items()}
    return CheckpointFiles(Path(), config, (), tensors, (), 0, {})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.half"}, "float16"),
        ({"text_config": {"dtype": "float64"}}, "float64"),
        ({"dtype": "auto", "text_config": {"torch_dtype": "float32"}}, "float32"),
        ({}, "bfloat16"),
        ({"dtype": "int8"}, "bfloat16"),
    ],
)
def test_what_is_stated_else_what_most_bytes_are(config: dict[str, Any], expected: str) -> None:
    assert auto_dtype(files(config, BF16=50, F32=20, I64=100)) == expected


def test_integers_and_empty_markers_do_not_count() -> None:
    assert most_stored_name(files({}, I64=9, F8_E4M3=0)) is None
    assert auto_dtype(files({}, I64=9)) == "float32"
    assert most_stored_name(files({}, BF16=50, F32=30)) == "float32"  # of bytes, not of numbers

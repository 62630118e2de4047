"""In which floating-point dtype a checkpoint is stored, and what `--dtype auto` means: told by config.json and the
headers, without torch, whose names are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.sizes import text_config
from duat_cli.text import shown

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of a dtype that models run in."""
SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What `--dtype` may call them as well."""
BITS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
"""Bits of exponent and mantissa of a number, likewise."""
_STATED = {"double": "float64", "float": "float32", "half": "float16"}
RUN_IN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What models run in, by safetensors' names."""
STORED_FLOATS = {
    **RUN_IN,
    # these only of empty tensors, which real checkpoints hold as markers, and of what quantised weights are made of
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""What weights are stored in, likewise."""


def no_dtype(name: str) -> InputError:
    """Of a name that `--dtype` does not know."""
    return InputError(f"--dtype {shown(name)}: expected auto, {', '.join([*SIZES, *SHORT])}")


def auto_dtype(files: CheckpointFiles) -> str:
    """What `--dtype auto` means: the dtype that config.json states, else the one of most stored bytes."""
    return stated_dtype(files) or most_stored_name(files) or "float32"


def stated_dtype(files: CheckpointFiles) -> str | None:
    """The dtype that config.json states, if models run in it."""
    return _stated_in(files.config) or _stated_in(text_config(files.config))


def rounded_at_load(files: CheckpointFiles) -> tuple[str, str] | None:
    """The dtype of most stored bytes and the one in which transformers loads them, by config.json, if that cannot hold
    every number of the first. None of quantised weights."""
    stored, loaded = most_bytes_in(files), _stated_in(files.config)
    if files.quantised or loaded is None or stored not in BITS:
        return None
    held = all(kept >= bits for kept, bits in zip(BITS[loaded], BITS[stored], strict=True))
    return None if held else (stored, loaded)


def _stated_in(config: Mapping[str, Any]) -> str | None:
    """The dtype that one config states, if models run in it."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    name = _STATED.get(stated, stated)
    return name if name in SIZES else None


def most_stored_name(files: CheckpointFiles) -> str | None:
    """The floating-point dtype of most of the checkpoint's bytes; None if it holds none. Of quantised weights the one
    that they were before, as config.json states it."""
    return (files.quantised and stated_dtype(files)) or most_bytes_in(files)


def most_bytes_in(files: CheckpointFiles) -> str | None:
    """The same of quantised weights as they are read."""
    sizes: Counter[str] = Counter()
    for entry in files.tensors.values():
        if entry.elements and entry.dtype in STORED_FLOATS:
            sizes[STORED_FLOATS[entry.dtype]] += entry.bytes
    return sizes.most_common(1)[0][0] if sizes else None

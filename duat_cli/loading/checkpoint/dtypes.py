"""The floating-point dtype of a checkpoint, and the meaning of `--dtype auto`. They follow from config.json and the
headers; torch's names are used, but not torch."""

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
"""Short names that `--dtype` also takes."""
BITS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
"""Bits of exponent and mantissa of each of these dtypes."""
_STATED = {"double": "float64", "float": "float32", "half": "float16"}
RUN_IN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes that models run in, by safetensors' names."""
STORED_FLOATS = {
    **RUN_IN,
    # these only for empty tensors, which real checkpoints hold as markers, and for the parts of quantised weights
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Dtypes that weights are stored in, by safetensors' names."""


def no_dtype(name: str) -> InputError:
    """The error for a name that `--dtype` does not know."""
    return InputError(f"--dtype {shown(name)}: expected auto, {', '.join([*SIZES, *SHORT])}")


def auto_dtype(files: CheckpointFiles) -> str:
    """The meaning of `--dtype auto`: the dtype that config.json states, else the one of most stored bytes, else
    float32."""
    return stated_dtype(files) or most_stored_name(files) or "float32"


def stated_dtype(files: CheckpointFiles) -> str | None:
    """The dtype that config.json states, if models run in it."""
    return _stated_in(files.config) or _stated_in(text_config(files.config))


def loaded_in(files: CheckpointFiles) -> str | None:
    """The dtype in which transformers loads the weights: the one that config.json states for the whole model, else the
    one of most stored bytes; None if there is none."""
    return _stated_in(files.config) or most_stored_name(files)


def rounded_at_load(files: CheckpointFiles) -> tuple[str, str] | None:
    """The dtype of most stored bytes, and the one in which transformers loads them by config.json, if the second cannot
    hold every number of the first; else None. None for quantised weights, too."""
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
    """The floating-point dtype of most of the checkpoint's bytes; None if it holds none. For quantised weights, the
    dtype before quantisation if config.json states it."""
    return (files.quantised and stated_dtype(files)) or most_bytes_in(files)


def most_bytes_in(files: CheckpointFiles) -> str | None:
    """The floating-point dtype of most of the checkpoint's bytes, quantised weights counted as they are read; None if
    it holds none."""
    sizes: Counter[str] = Counter()
    for entry in files.tensors.values():
        if entry.elements and entry.dtype in STORED_FLOATS:
            sizes[STORED_FLOATS[entry.dtype]] += entry.bytes
    return sizes.most_common(1)[0][0] if sizes else None

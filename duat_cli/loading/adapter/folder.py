"""An adapter folder as PEFT writes it (0.21 format), read as untrusted input: its config and its headers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from duat_cli.loading.checkpoint.files import fail, kind, read_json, refuse_foreign_link
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.index import ADAPTER_CONFIG
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, single_file
from duat_cli.text import shown

ADAPTER_WEIGHTS = "adapter_model.safetensors"
METHODS = ("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "TRAINABLE_TOKENS")
_PICKLE = "adapter_model.bin"

# LoRA variants whose forward pass is no fixed change of weights, or another one than scaling * B A
_VARIANTS = {
    "arrow_config": "Arrow routing",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA, which acts behind its invocation tokens only",
    "kasa_config": "KaSA",
    "use_qalora": "QALoRA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}


_NO_VALUES = {
    "C64": "complex numbers",
    "F4": "two numbers a byte",
    "F6_E2M3": "six bits a number",
    "F6_E3M2": "six bits a number",
}
"""safetensors' dtypes that torch cannot read as real numbers."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter whose files can be read."""

    path: Path
    name: str
    """The adapter's name as the user wrote it."""
    config: dict[str, Any]
    weights: CheckpointFiles

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return self.weights.tensors

    @property
    def method(self) -> str:
        return str(self.config["peft_type"])

    @property
    def where(self) -> Path:
        """The weight file, for messages."""
        return self.path / ADAPTER_WEIGHTS


def digest_of(adapter: AdapterFiles) -> str:
    """sha256 over config and weight file."""
    whole = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (adapter.path / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).exists() or (path / ADAPTER_CONFIG).is_symlink()


def open_adapter(path: Path, name: str) -> AdapterFiles:
    """The adapter in a folder; CheckpointError names the file, the field and what to do. No weight is read."""
    if not path.is_dir():
        fail(path, "no such folder" if not path.exists() else "is a file; expected an adapter folder")
    refuse_foreign_link(path, ADAPTER_CONFIG)
    config = read_json(path / ADAPTER_CONFIG, unique=True)
    _check_config(path / ADAPTER_CONFIG, config)
    weights = path / ADAPTER_WEIGHTS
    if not (weights.exists() or weights.is_symlink()):
        if (path / _PICKLE).exists():
            fail(path / _PICKLE, "is a pickle, which can run code and is never opened: save the adapter as "
                                 f"safetensors ({ADAPTER_WEIGHTS}), where you trust the file")  # fmt: skip
        fail(weights, "missing: no such file; expected a folder made by PEFT's save_pretrained")
    refuse_foreign_link(path, ADAPTER_WEIGHTS)
    files = single_file(weights)
    for tensor, entry in files.tensors.items():
        if entry.dtype in _NO_VALUES:
            fail(weights, f"tensor {shown(tensor)} is stored as {entry.dtype} ({_NO_VALUES[entry.dtype]}), which is no "
                          "fixed change of weights: save the adapter in float32, float16 or bfloat16")  # fmt: skip
    return AdapterFiles(path, name, config, files)


def _check_config(where: Path, config: dict[str, Any]) -> None:
    method = config.get("peft_type")
    if method not in METHODS:
        fail(where, f"peft_type: {shown(method)} is not supported; duat reads {', '.join(METHODS)}; where PEFT can "
                    "merge it (merge_and_unload), save the merged model and compare that with the base")  # fmt: skip
    if method != "LORA":
        return
    for field, name in _VARIANTS.items():
        if config.get(field):
            fail(where, f"{field}: {name} is not supported: it is no fixed change of the weights that duat knows")


# --- fields, whose types a hand-edited file may have wrong ------------------------------------------


def number(adapter: AdapterFiles, field: str, default: float, low: float | None = None) -> float:
    value = adapter.config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _wrong(adapter, field, "a number", value)
    if low is not None and value < low:
        _wrong(adapter, field, f"at least {low:g}", value)
    return float(value)


def patterns(adapter: AdapterFiles, field: str) -> dict[str, Any]:
    """The field rank_pattern or alpha_pattern: a name or regular expression -> a number."""
    value = adapter.config.get(field) or {}
    if not isinstance(value, dict):
        _wrong(adapter, field, "an object", value)
    return value


def names(adapter: AdapterFiles, field: str) -> list[str]:
    """A field that is a list of names. A single text becomes a list of one, an absent field an empty list."""
    value = adapter.config.get(field) or []
    if isinstance(value, str):
        return [value]
    if not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        _wrong(adapter, field, "a list of names", value)
    return value


def _wrong(adapter: AdapterFiles, field: str, expected: str, value: object) -> NoReturn:
    got = kind(value) if not isinstance(value, (int, float, str)) else shown(value)
    fail(adapter.path / ADAPTER_CONFIG, f"{field}: expected {expected}, got {got}")

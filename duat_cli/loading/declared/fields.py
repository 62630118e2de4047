"""The fields of config.json and generation_config.json, by dotted path, except those that cannot change a result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duat_cli.loading.checkpoint.files import read_json

GENERATION = "generation_config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_VIDEO = "video_preprocessor_config.json"
MAX_BYTES = 16 << 20

# Fields that cannot change a result, by the last part of their path, and why
IGNORED: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (why, re.compile(names))
    for why, names in (
        ("where the file comes from", r"transformers_version|_?name_or_path|_commit_hash|_from_model_config"),
        ("how weights are stored: integrity.dtype, and `stored` of the baseline", r"dtype|torch_dtype"),
        ("what a call returns beside its result", r"use_cache|return_dict\w*|output_\w+"),
        ("how the same numbers are computed", r"_?(attn|experts)_implementation\w*|pretraining_tp|chunk_size\w*"),
        ("training alone: eval mode turns it off", r"\w*dropout\w*|\w+_pdrop|\w*layerdrop|router_jitter_noise"),
        ("training alone: loss and memory", r"problem_type|router_\w+_loss_coef|gradient_checkpointing"),
        ("training alone: how untrained weights are drawn", r"initializer_\w+|init_std"),
        ("the other direction of id2label", r"label2id"),
    )
)  # fmt: skip


def why_ignored(path: str) -> str | None:
    """Why a field cannot change a result; None where it can. Every part of its path is tested."""
    parts = path.split(".")
    return next((why for why, names in IGNORED if any(names.fullmatch(part) for part in parts)), None)


def flat(content: dict[str, Any]) -> dict[str, Any]:
    """Dotted path -> value of every field that can change a result; lists are values, and null is no value."""
    return {path: value for path, value in _walk(content, "") if value is not None and why_ignored(path) is None}


def _walk(content: dict[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", _finite(value)


def _finite(value: Any) -> Any:
    """The value, with numbers that JSON lacks, such as infinity, as texts."""
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def resolved(config: Any) -> dict[str, Any]:
    """The fields of a config in transformers, its class's defaults included."""
    return flat(json.loads(json.dumps(config.to_dict(), default=str)))


def generation(folder: Path) -> dict[str, Any]:
    """The whole content of generation_config.json; {} where there is no such file. CheckpointError names a fault."""
    return _stated(folder / GENERATION)


def processor(folder: Path) -> dict[str, Any]:
    """'preprocessor_config.json.image_mean' -> value, for all fields that decide how pictures and sounds become
    tensors."""
    stated = {name: flat(_stated(folder / name)) for name in (*PROCESSORS, _VIDEO)}
    return {f"{name}.{path}": value for name, fields in stated.items() for path, value in fields.items()}


def _stated(path: Path) -> dict[str, Any]:
    if not (path.exists() or path.is_symlink()):
        return {}
    return read_json(path, limit=MAX_BYTES)

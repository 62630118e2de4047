"""Strict pre-flight of a checkpoint folder: config.json and the safetensors headers, and nothing else.

transformers is no validator: it fills missing tensors with random values, follows `../` in an index and builds a
million layers before it notices. Here every file is read as untrusted input, and errors name the file and the field. No
library is loaded. No weight is read, except tensors that are in several files. A folder takes about a millisecond.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duat_cli.compat.transformers import IMPLEMENTATION_FIELD
from duat_cli.loading.checkpoint.dequantised import QUANTISATION, check_method, dequantised
from duat_cli.loading.checkpoint.files import fail, near_folder, read_json, refuse_foreign_link
from duat_cli.loading.checkpoint.headers import TensorEntry, read_header
from duat_cli.loading.checkpoint.index import ADAPTER_CONFIG, INDEX, WEIGHTS, merge, refuse_gguf, weight_files
from duat_cli.loading.checkpoint.orientation import refuse_turned
from duat_cli.loading.checkpoint.seal import Seal
from duat_cli.loading.checkpoint.sizes import DEPTH
from duat_cli.text import clean, listed, natural, plural, shown

CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"
_MAX_CONFIG_BYTES = 16 << 20  # public ones have a few kB, with label names up to one MB

# zero of these is no transformer
_DEPTH = frozenset(DEPTH)
_HEADS = frozenset({"num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"})
_LAYERS = _DEPTH | {"encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"}
_SIZES = frozenset({
    "hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "head_dim", "vocab_size",
    "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
    "num_experts", "num_local_experts", "n_routed_experts", *_HEADS,
})  # fmt: skip
_DTYPES = frozenset({"auto", "float64", "float32", "float16", "bfloat16", "double", "float", "half"})


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint folder whose files agree with each other."""

    path: Path
    config: dict[str, Any]
    shards: tuple[str, ...]
    """Weight files relative to the folder."""
    tensors: dict[str, TensorEntry]
    """The tensors of the model; a quantised weight under its own name."""
    warnings: tuple[str, ...]
    total_bytes: int
    """Bytes of all tensors, without the headers."""
    seals: dict[str, Seal]
    """Shard -> its seal when its header was read; a file that changes afterwards is refused."""
    stored: dict[str, TensorEntry] = dataclasses.field(default_factory=dict)
    """The tensors in the files; in `tensors`, weights replace what they are quantised to."""
    quantised: str | None = None
    """The quantisation in words; None where weights are stored as they are."""
    misplaced: tuple[str, ...] = ()
    """Tensors that the index places in another shard than the one that holds them, or in none."""


def inspect_folder(path: Path) -> CheckpointFiles:
    """The files of a checkpoint, checked; CheckpointError names the first fault, and what to do."""
    try:
        return _inspect(path)
    except OSError as error:  # a folder without permission, or a name that is too long
        fail(path, f"cannot be read: {error.strerror or error}")


def single_file(path: Path) -> CheckpointFiles:
    """A single safetensors file, its header checked."""
    tensors, seal = read_header(path, path.name)
    return CheckpointFiles(path.parent, {}, (path.name,), tensors, (), 0, {path.name: seal})


def _inspect(path: Path) -> CheckpointFiles:
    _require_folder(path)
    config = _read_config(path)
    check_config(path / CONFIG, config)
    _refuse_adapter(path)
    weights = weight_files(path)
    merged = merge(path, weights)
    if not merged.tensors:
        fail(path / weights.shards[0], "holds no tensors: expected the model's weights; fetch or save it again")
    tensors, quantised = dequantised(path, _quantisation(config), merged)
    _refuse_small_floats(path, tensors)
    refuse_turned(path, tensors)
    _check_sizes(path / CONFIG, config, tensors)
    _check_model_type(path / CONFIG, config)
    warnings = [*weights.warnings, *merged.warnings, *_odd_names(tensors)]
    total = sum(t.bytes for t in merged.tensors.values())
    return CheckpointFiles(
        path=path,
        config=config,
        shards=weights.shards,
        tensors=tensors,
        warnings=tuple(warnings),
        total_bytes=total,
        seals=merged.seals,
        stored=merged.tensors,
        quantised=quantised,
        misplaced=merged.misplaced,
    )


def _require_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        refuse_gguf(path.parent, [path.name])
        fail(path, "is a file; expected the folder that holds config.json and the weights")
    fail(path, f"no such folder{near_folder(path)}")


# --- config.json ------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    if not ((path / CONFIG).exists() or (path / CONFIG).is_symlink()):
        if (path / ADAPTER_CONFIG).exists():
            fail(path, f"holds an adapter ({ADAPTER_CONFIG}) and no config.json: give the base model's folder")
        refuse_gguf(path, sorted(entry.name for entry in path.iterdir()))
        below = sorted((one.name for one in path.iterdir() if os.path.isfile(one / CONFIG)), key=natural)
        more = f", and {len(below) - 1} more" if len(below) > 1 else ""
        hint = f"; found {clean(below[0])}/{CONFIG}{more}: give {clean(str(path / below[0]))}" if below else ""
        fail(path / CONFIG, f"missing: no such file; expected a folder made by save_pretrained{hint}")
    refuse_foreign_link(path, CONFIG)
    config = read_json(path / CONFIG, limit=_MAX_CONFIG_BYTES, unique=True)
    if "pretrained_cfg" in config and "model_type" not in config:  # a checkpoint of timm, as transformers tells it
        config["model_type"] = "timm_wrapper"
    return config


def _refuse_adapter(path: Path) -> None:
    """Refuses an adapter in the folder. With peft installed, transformers loads it without notice; some releases take
    the base that the adapter names in the place of the weights beside it."""
    if not ((path / ADAPTER_CONFIG).exists() or (path / ADAPTER_CONFIG).is_symlink()):
        return
    if not any((path / name).exists() for name in (WEIGHTS, INDEX)):
        fail(path, f"holds an adapter ({ADAPTER_CONFIG}) and no weights of a model: give the base model's folder")
    fail(path / ADAPTER_CONFIG, "an adapter beside the weights, which transformers would load, with its base, in their "
         "place: move it to a folder of its own, and compare with 'duat lora-diff FOLDER ADAPTER'")  # fmt: skip


def check_config(where: Path, config: dict[str, Any]) -> None:
    """Checks fields that could steer the loader or exhaust memory, before transformers sees them."""
    for field, value in config_fields(config):
        name = field.rpartition(".")[2]
        if isinstance(value, float) and math.isnan(value):
            fail(where, f"{clean(field)}: expected a number, got NaN")
        if name in _LAYERS | _SIZES:
            _check_number(where, field, value)
        elif name in ("dtype", "torch_dtype"):
            _check_dtype(where, field, value)
        elif IMPLEMENTATION_FIELD.fullmatch(name):
            _check_implementation(where, field, value)
    for field, value in _quantisation(config):
        check_method(where, field, value)
    _check_architectures(where, config.get("architectures"))


def _quantisation(config: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (field, value) for field, value in config_fields(config) if field.rpartition(".")[2] in QUANTISATION and value
    ]


def config_fields(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each field of the config and of the configs inside it."""
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, dict) and key.endswith("_config"):
            yield from config_fields(value, f"{prefix}{key}.")


def _check_number(where: Path, field: str, value: object) -> None:
    # lists, one entry a layer, and numbers by stack (LXMERT's depths) are left to transformers
    if value is None or isinstance(value, list):
        return
    if isinstance(value, dict) and value and all(type(number) is int and number > 0 for number in value.values()):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{shown(value)}, a {type(value).__name__}"
        fail(where, f"{clean(field)}: expected an integer, got {got}")
    if value < 0 or (value == 0 and field.rpartition(".")[2] in _DEPTH | _HEADS):
        fail(where, f"{clean(field)}: expected a number above 0, got {value}")


def _check_dtype(where: Path, field: str, value: object) -> None:
    for dtype in value.values() if isinstance(value, dict) else [value]:
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            fail(where, f"{clean(field)}: unknown dtype {shown(dtype)}; expected such as float32")


def _check_implementation(where: Path, field: str, value: object) -> None:
    for name in value.values() if isinstance(value, dict) else [value]:
        # 'org/repo' makes transformers fetch and run a kernel, even when the caller asks for eager
        if name is not None and (not isinstance(name, str) or re.search(r"[/:\\]", name)):
            fail(where, f"{clean(field)}: {shown(name)} names a kernel repository, which duat does not run; "
                        "remove the field")  # fmt: skip


def _check_architectures(where: Path, value: object) -> None:
    if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        fail(where, f"architectures: expected a list of class names, got {shown(value)}")


def _check_model_type(where: Path, config: dict[str, Any]) -> None:
    """Checks the form of model_type only; whether transformers knows it is checked at the load (model_class.py)."""
    model_type = config.get("model_type")
    if config.get("auto_map"):  # the checkpoint's own code may do without
        return
    if model_type is None:
        fail(where, "model_type: missing; expected such as 'llama'")
    if not isinstance(model_type, str):
        fail(where, f"model_type: expected a text, got {shown(model_type)}")


def _check_sizes(where: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
    """Refuses numbers that the weight files cannot hold, before a module is built from them.

    Exact disagreements are found at load, by shape. This check only keeps a config of 10^6 layers or 10^9 columns from
    being built. A layer has a number in its tensors' names, unless layers share weights (albert).
    """
    elements = sum(t.elements for t in tensors.values())
    numbered = 1 + max((int(n) for name in tensors for n in re.findall(r"\.(\d{1,9})\.", name)), default=0)
    for field, value in config_fields(config):
        name = field.rpartition(".")[2]
        if not isinstance(value, int):
            continue
        if name in _LAYERS and value > 4 * numbered + 64:
            fail(where, f"{clean(field)}: {value} layers, but the weight files hold {numbered}: "
                        "too many layers are missing; the config belongs to another checkpoint")  # fmt: skip
        if name in _SIZES and value > elements:
            fail(where, f"{clean(field)}: {value} is too large: all tensors together hold {elements} "
                        "numbers; the config does not match the weight files")  # fmt: skip


# --- tensors ----------------------------------------------------------------------------------------


def _refuse_small_floats(path: Path, tensors: dict[str, TensorEntry]) -> None:
    """Refuses floats of eight bits or fewer, which mean nothing without their scales; only a quantiser knows how to
    apply those."""
    small = [n for n, t in tensors.items() if t.dtype.startswith(("F8_", "F6_", "F4")) and t.elements]
    if small:
        entry, many = tensors[min(small)], plural(len(small), "tensor")
        beside = f" by ModelOpt ({_MODELOPT}), which is not read" if (path / _MODELOPT).exists() else ""
        fail(path / entry.shard, f"{many} quantised ({entry.dtype}){beside}: {listed(small)}; "
                                 "give the checkpoint in full precision")  # fmt: skip


def _odd_names(tensors: dict[str, TensorEntry]) -> list[str]:
    odd = [name for name in tensors if clean(name) != name]
    many = plural(len(odd), "tensor name")
    return [f"{many} with control characters, shown escaped: {listed(odd)}"] if odd else []

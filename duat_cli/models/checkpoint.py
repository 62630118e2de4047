"""Strict pre-flight of a checkpoint folder: config.json and the safetensors headers, and nothing else.

transformers is no validator: it fills missing tensors with random values, follows `../` in an index and
builds a million layers before it notices. Here every file is read as untrusted input, and what is wrong is
named by file and field. No weight is read; four shards of 1.8 GB take about a millisecond.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, TypeGuard

from duat_cli.errors import CheckpointError
from duat_cli.text import clean

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_JSON_BYTES = 256 << 20  # the index of the largest public checkpoints is below 10 MB
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_LFS = b"version https://git-lfs"
_NAMES_SHOWN = 4

# bits an element, by safetensors' own names
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip

# zero of these is no transformer
_DEPTH = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"})
_LAYERS = _DEPTH | {"encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"}
_SIZES = frozenset({
    "hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "head_dim", "vocab_size",
    "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
    "num_attention_heads", "num_key_value_heads", "n_head",
    "num_experts", "num_local_experts", "n_routed_experts",
})  # fmt: skip
_DTYPES = frozenset({"auto", "float64", "float32", "float16", "bfloat16", "double", "float", "half"})
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: F32, BF16, I64."""
    shard: str
    """File that holds it, relative to the folder."""
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint folder whose files agree with each other."""

    path: Path
    config: dict[str, Any]
    shards: tuple[str, ...]
    """Weight files relative to the folder."""
    tensors: dict[str, TensorEntry]
    warnings: tuple[str, ...]
    total_bytes: int
    """Of all tensors, without the headers."""


def inspect_folder(path: Path, *, trust_remote_code: bool = False) -> CheckpointFiles:
    """The files of a checkpoint, checked; `CheckpointError` names the first fault, and the way out."""
    _require_folder(path)
    config = _read_config(path)
    check_config(path / CONFIG, config)
    weights = _weight_files(path)
    tensors, warnings = _merge(path, weights)
    _refuse_small_floats(path, tensors)
    _check_sizes(path / CONFIG, config, tensors)
    _check_model_type(path / CONFIG, config, trust_remote_code)
    warnings = [*weights.warnings, *warnings, *_odd_names(tensors)]
    total = sum(t.bytes for t in tensors.values())
    return CheckpointFiles(path, config, weights.shards, tensors, tuple(warnings), total)


def shown(name: object, limit: int = 120) -> str:
    """A foreign name in quotes, fit for a terminal, cut when absurdly long."""
    text = clean(str(name))
    return f"'{text}'" if len(text) <= limit else f"'{text[:limit]}...'"


def listed(names: list[str]) -> str:
    """The first few names, sorted, and how many more there are."""
    first = ", ".join(shown(n) for n in sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{first} and {more} more" if more > 0 else first


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _fail(where: Path, text: str) -> NoReturn:
    raise CheckpointError(f"{clean(str(where))}: {text}")


# --- files ------------------------------------------------------------------------------------------


def _require_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        _fail(path, "is a file; expected the folder that holds config.json and the weights")
    _fail(path, "no such folder")


def _open(path: Path) -> BinaryIO:
    """A regular file opened for reading; links are followed, as the hub cache is made of them."""
    try:
        # a named pipe would make open() wait for ever
        if not stat.S_ISREG(path.stat().st_mode):
            _fail(path, "is no regular file")
        return path.open("rb")
    except FileNotFoundError:
        if path.is_symlink():
            _fail(path, "is a dangling symlink (an interrupted download or a pruned cache): fetch it again")
        _fail(path, "missing: no such file")
    except (OSError, ValueError) as error:
        _fail(path, f"cannot be read: {_reason(error)}")


def _reason(error: Exception) -> str:
    return clean(getattr(error, "strerror", None) or str(error))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file, or the reason why the file is none."""
    with _open(path) as file:
        raw = file.read(_MAX_JSON_BYTES + 1)
    if len(raw) > _MAX_JSON_BYTES:
        _fail(path, f"more than {_MAX_JSON_BYTES} bytes; expected a JSON text")
    _refuse_pointer(path, raw)
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        _fail(path, f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; save it as UTF-8")
    except json.JSONDecodeError as error:
        _fail(path, f"not JSON: {clean(error.msg)} at line {error.lineno}, of {len(raw)} bytes: truncated?")
    except (ValueError, RecursionError) as error:
        _fail(path, f"not usable JSON: {clean(str(error))}")
    if not isinstance(value, dict):
        _fail(path, f"expected a JSON object, got {type(value).__name__}")
    return value


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_LFS):
        size = re.search(rb"\nsize (\d{1,20})", start)
        missing = f"{size[1].decode()} bytes" if size else "content"
        _fail(path, f"is a git-lfs pointer ({missing} not fetched): run 'git lfs pull'")


# --- config.json ------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    if (path / CONFIG).exists() or (path / CONFIG).is_symlink():
        return read_json(path / CONFIG)
    if (path / "adapter_config.json").exists():
        _fail(path, "holds an adapter (adapter_config.json) and no config.json: give the base model's folder")
    _fail(path / CONFIG, "missing: no such file; expected a folder made by save_pretrained")


def check_config(where: Path, config: dict[str, Any]) -> None:
    """Fields that could steer the loader or exhaust memory, before transformers sees them."""
    for field, value in _fields(config):
        name = field.rpartition(".")[2]
        if name in _LAYERS | _SIZES:
            _check_number(where, field, value)
        elif name in ("dtype", "torch_dtype"):
            _check_dtype(where, field, value)
        elif _IMPLEMENTATION.fullmatch(name):
            _check_implementation(where, field, value)
        elif name in ("quantization_config", "compression_config") and value:
            _refuse_quantised(where, field, value)
    _check_architectures(where, config.get("architectures"))


def _fields(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of the config and of the configs inside it."""
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _fields(value, f"{prefix}{key}.")


def _check_number(where: Path, field: str, value: object) -> None:
    if value is None or isinstance(value, list):  # lists, one entry a layer, are left to transformers
        return
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{shown(value)}, a {type(value).__name__}"
        _fail(where, f"{clean(field)}: expected an integer, got {got}")
    if value < 0 or (value == 0 and field.rpartition(".")[2] in _DEPTH):
        _fail(where, f"{clean(field)}: expected a number above 0, got {value}")


def _check_dtype(where: Path, field: str, value: object) -> None:
    for dtype in value.values() if isinstance(value, dict) else [value]:
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            _fail(where, f"{clean(field)}: unknown dtype {shown(dtype)}; expected such as float32")


def _check_implementation(where: Path, field: str, value: object) -> None:
    for name in value.values() if isinstance(value, dict) else [value]:
        # 'org/repo' makes transformers fetch and run a kernel, even when the caller asks for eager
        if name is not None and (not isinstance(name, str) or re.search(r"[/:\\]", name)):
            _fail(where, f"{clean(field)}: {shown(name)} names a kernel repository, which duat does not run; "
                         "remove the field")  # fmt: skip


def _refuse_quantised(where: Path, field: str, value: object) -> None:
    method = value.get("quant_method") if isinstance(value, dict) else value
    _fail(where, f"{clean(field)}: quantised weights (quant_method {shown(method)}) are not supported; "
                 "give the checkpoint in full precision, or dequantise it")  # fmt: skip


def _check_architectures(where: Path, value: object) -> None:
    if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        _fail(where, f"architectures: expected a list of class names, got {shown(value)}")


def _check_model_type(where: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    model_type, auto_map = config.get("model_type"), config.get("auto_map")
    if trust_remote_code and auto_map:
        return
    if model_type is not None and not isinstance(model_type, str):
        _fail(where, f"model_type: expected a text, got {shown(model_type)}")
    # imported here and last: it loads torch, and every other check does without
    import transformers

    if model_type in transformers.CONFIG_MAPPING:
        return
    if auto_map:
        _fail(where, f"auto_map: model_type {shown(model_type)} needs custom code that comes with the "
                     "checkpoint; it was not run. Read it, then use --trust-remote-code")  # fmt: skip
    if model_type is None:
        _fail(where, "model_type: missing; expected such as 'llama'")
    _fail(where, f"model_type: {shown(model_type)} is unknown to transformers {transformers.__version__}; "
                 "a newer transformers may know it")  # fmt: skip


def _check_sizes(where: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
    """Numbers that the weight files cannot hold, before a module is built from them.

    Exact disagreements are found at load, by shape; this only keeps a config of 10^6 layers or 10^9 columns
    from being built. A layer has a number in its tensors' names, unless layers share weights (albert).
    """
    elements = sum(t.elements for t in tensors.values())
    numbered = 1 + max((int(n) for name in tensors for n in re.findall(r"\.(\d{1,9})\.", name)), default=0)
    for field, value in _fields(config):
        name = field.rpartition(".")[2]
        if not isinstance(value, int):
            continue
        if name in _LAYERS and value > 4 * numbered + 64:
            _fail(where, f"{clean(field)}: {value} layers, but the weight files hold {numbered}: "
                         "too many layers are missing; the config belongs to another checkpoint")  # fmt: skip
        if name in _SIZES and value > elements:
            _fail(where, f"{clean(field)}: {value} is too large: all tensors together hold {elements} "
                         "numbers; the config does not match the weight files")  # fmt: skip


# --- which weight files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WeightFiles:
    shards: tuple[str, ...]
    weight_map: dict[str, str] | None = None
    """The index's tensor -> file; None where there is one file and no index."""
    total_size: object = None
    """What the index states, bytes; None where it states nothing."""
    warnings: tuple[str, ...] = ()


def _weight_files(path: Path) -> _WeightFiles:
    """The files to read, in the order that transformers looks for them."""
    single, index = path / WEIGHTS, path / INDEX
    if single.exists() or single.is_symlink():
        both = (f"{INDEX}: not used, as {WEIGHTS} stands beside it",) if index.exists() else ()
        return _WeightFiles((WEIGHTS,), warnings=both)
    if index.exists() or index.is_symlink():
        return _read_index(index)
    _refuse_other_formats(path)
    _fail(path, f"no weights: expected {WEIGHTS}, or {INDEX} with its shards")


def _refuse_other_formats(path: Path) -> None:
    names = sorted(p.name for p in path.iterdir())
    if any(n.endswith(".safetensors") for n in names):
        found = [n for n in names if n.endswith(".safetensors")]
        _fail(path, f"expected {WEIGHTS} or {INDEX}, got {listed(found)}: rename, or restore the index")
    found = [n for n in names if n.endswith(_OTHER_FORMATS)]
    if found:
        _fail(path, f"no {WEIGHTS}, only {listed(found)}: duat never opens pickle or other formats; convert "
                    "to safetensors with save_pretrained, where you trust the file")  # fmt: skip


def _read_index(index: Path) -> _WeightFiles:
    content = read_json(index)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index, f"weight_map: expected an object from tensor to file, got {_kind(weight_map)}")
    for tensor, name in weight_map.items():
        _check_shard_name(index, tensor, name)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return _WeightFiles(tuple(sorted(set(weight_map.values()))), weight_map, total)


def _kind(value: object) -> str:
    return "none" if value is None else f"{'an empty ' if not value else ''}{type(value).__name__}"


def _check_shard_name(index: Path, tensor: str, name: object) -> None:
    place = f"weight_map {shown(tensor)}"
    if not isinstance(name, str):
        _fail(index, f"{place}: expected a file name, got {_kind(name)}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or ":" in name or "\0" in name:
        _fail(index, f"{place}: {shown(name)} lies outside the folder, which is not allowed")
    if not name.endswith(".safetensors"):
        _fail(index, f"{place}: {shown(name)} is no safetensors file; convert the checkpoint to safetensors")


# --- tensors ----------------------------------------------------------------------------------------


def _merge(path: Path, weights: _WeightFiles) -> tuple[dict[str, TensorEntry], list[str]]:
    """All tensors of all shards, and where the index disagrees with the headers, which decide."""
    holders: dict[str, list[TensorEntry]] = {}
    for shard in weights.shards:
        for name, entry in read_header(path / shard, shard).items():
            holders.setdefault(name, []).append(entry)
    mapped = weights.weight_map
    if mapped is None:
        return {name: entries[0] for name, entries in holders.items()}, []
    absent = [name for name in mapped if name not in holders]
    if absent:
        many = counted(len(absent), "tensor")
        _fail(path / INDEX, f"weight_map: {many} missing from every shard: {listed(absent)}")
    tensors = {name: _chosen(entries, mapped.get(name)) for name, entries in holders.items()}
    return tensors, _index_warnings(weights, holders, tensors)


def _chosen(entries: list[TensorEntry], mapped: str | None) -> TensorEntry:
    """Where a name is in several shards, the one that the index names."""
    return next((e for e in entries if e.shard == mapped), entries[0])


def _index_warnings(
    weights: _WeightFiles, holders: dict[str, list[TensorEntry]], tensors: dict[str, TensorEntry]
) -> list[str]:
    warnings = []
    mapped = weights.weight_map or {}
    wrong = [name for name, entry in tensors.items() if mapped.get(name) != entry.shard]
    if wrong:
        warnings.append(f"{INDEX}: weight_map disagrees with the shards on {listed(wrong)}; they decide")
    twice = [name for name, entries in holders.items() if len(entries) > 1]
    if twice:
        many = counted(len(twice), "tensor")
        warnings.append(f"{many} in more than one shard: {listed(twice)}; the index decides")
    size = sum(e.bytes for entries in holders.values() for e in entries)
    if weights.total_size not in (None, size):
        stated = shown(weights.total_size)
        warnings.append(f"{INDEX}: metadata.total_size is {stated}, but the shards hold {size} bytes")
    return warnings


def read_header(path: Path, shard: str) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, from its first bytes; every offset is checked.

    Format: 8 bytes header length (little endian), a JSON header, then the data without gaps.
    """
    with _open(path) as file:
        size = path.stat().st_size
        start = file.read(8)
        _refuse_pointer(path, start + file.read(512))
        length = _header_length(path, start, size)
        file.seek(8)
        raw = file.read(length)
    header = _parse_header(path, raw)
    ranges = []
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        entries[name], low, high = _entry(path, name, value, shard)
        ranges.append((low, high, name))
    _check_layout(path, sorted(ranges), 8 + length, size)
    return entries


def _header_length(path: Path, start: bytes, size: int) -> int:
    if size == 0:
        _fail(path, "is empty (0 bytes): fetch it again")
    if size < 8:
        _fail(path, f"too small for a safetensors header: {size} bytes; truncated?")
    length = int.from_bytes(start, "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        foreign = f"no safetensors file; it begins with {start!r}"
        cause = "truncated?" if length <= _MAX_HEADER_BYTES else foreign
        _fail(path, f"header length field says {length} bytes, the file has {size}: {cause}")
    return length


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        _fail(path, f"header is not UTF-8: byte 0x{raw[error.start]:02x} at offset {8 + error.start}")
    except (ValueError, RecursionError) as error:
        _fail(path, f"header is not JSON: {clean(str(error))}; corrupt?")
    if not isinstance(header, dict):
        _fail(path, f"header: expected a JSON object, got {type(header).__name__}")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of two equal keys, other readers the first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {shown(twice)} stands twice")
    return found


def _entry(path: Path, name: str, value: object, shard: str) -> tuple[TensorEntry, int, int]:
    """One tensor and its byte range, both ends checked against its shape and dtype."""
    place = f"header: tensor {shown(name)}"
    if not isinstance(value, dict):
        _fail(path, f"{place}: expected an object, got {_kind(value)}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        _fail(path, f"{place}: dtype {shown(dtype)} is unknown")
    if not _are_sizes(shape):
        _fail(path, f"{place}: shape {shown(shape)} is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"{place}: data_offsets {shown(offsets)} are no byte range")
    low, high = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (high - low):
        _fail(path, f"{place}: shape {shape} of {dtype} takes {-(-bits // 8)} bytes, "
                    f"data_offsets hold {high - low}")  # fmt: skip
    return TensorEntry(tuple(shape), dtype, shard, high - low), low, high


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(path: Path, ranges: list[tuple[int, int, str]], start: int, size: int) -> None:
    """The tensors lie side by side, from the header's end to the file's end."""
    end = 0
    for low, high, name in ranges:
        if low != end:
            fault = "overlaps its neighbour" if low < end else "leaves a hole before it"
            _fail(path, f"header: tensor {shown(name)} {fault}: data_offsets start at {low}, expected {end}")
        end = high
    if size < start + end:
        _fail(path, f"file has {size} bytes, header covers {start + end}: truncated? Fetch it again")
    if size > start + end:
        _fail(path, f"{size - start - end} trailing bytes: file has {size}, header covers {start + end}")


def _refuse_small_floats(path: Path, tensors: dict[str, TensorEntry]) -> None:
    """Eight-bit floats mean nothing without their scales, which only a quantiser knows how to apply."""
    small = [n for n, t in tensors.items() if t.dtype.startswith(("F8", "F6", "F4")) and t.elements]
    if small:
        entry, many = tensors[min(small)], counted(len(small), "tensor")
        _fail(path / entry.shard, f"{many} quantised ({entry.dtype}): {listed(small)}; "
                                  "give the checkpoint in full precision")  # fmt: skip


def _odd_names(tensors: dict[str, TensorEntry]) -> list[str]:
    odd = [name for name in tensors if clean(name) != name]
    many = counted(len(odd), "tensor name")
    return [f"{many} with control characters, shown escaped: {listed(odd)}"] if odd else []

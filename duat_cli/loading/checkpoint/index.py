"""The weight files of a folder, and all their tensors. Where an index disagrees with the headers, the headers
decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from duat_cli.loading.checkpoint.files import fail, kind, open_file, read_json, refuse_foreign_link
from duat_cli.loading.checkpoint.headers import TensorEntry, read_header
from duat_cli.loading.checkpoint.seal import Seal
from duat_cli.text import listed, plural, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
_MAX_INDEX_BYTES = 64 << 20  # the largest public ones have below 10 MB
CHUNK = 1 << 20  # bytes of a tensor that are compared at a time
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold the weights, and the content of their index."""

    shards: tuple[str, ...]
    weight_map: dict[str, str] | None = None
    """Tensor -> file, as the index says; None for one file without an index."""
    total_size: object = None
    """Total size that the index states, in bytes; None if it states none."""
    warnings: tuple[str, ...] = ()


def weight_files(path: Path) -> WeightFiles:
    """The files to read, in the order that transformers looks for them."""
    single, index = path / WEIGHTS, path / INDEX
    if single.exists() or single.is_symlink():
        both = (f"{INDEX}: not used, as {WEIGHTS} stands beside it",) if index.exists() else ()
        return WeightFiles((WEIGHTS,), warnings=both)
    if not (index.exists() or index.is_symlink()):
        _refuse_other_formats(path)
        fail(path, f"no weights: expected {WEIGHTS}, or {INDEX} with its shards")
    return _read_index(index)


def _refuse_other_formats(path: Path) -> None:
    names = sorted(p.name for p in path.iterdir())
    if any(n.endswith(".safetensors") for n in names):
        found = [n for n in names if n.endswith(".safetensors")]
        fail(path, f"expected {WEIGHTS} or {INDEX}, got {listed(found)}: rename, or restore the index")
    refuse_gguf(path, names)
    found = [n for n in names if n.endswith(_OTHER_FORMATS)]
    if found:
        fail(path, f"no {WEIGHTS}, only {listed(found)}: duat never opens pickle or other formats; convert "
                   "to safetensors with save_pretrained, where you trust the file")  # fmt: skip


def refuse_gguf(folder: Path, names: Sequence[str]) -> None:
    """CheckpointError if one of the folder's files is GGUF, by its name."""
    found = next((name for name in names if name.endswith(".gguf")), None)
    if found is not None:
        fail(folder / found, "GGUF is not read: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME) of "
             "transformers makes full precision of it, and save_pretrained of model and tokenizer a folder to give "
             "here")  # fmt: skip


def _read_index(index: Path) -> WeightFiles:
    content = read_json(index, limit=_MAX_INDEX_BYTES, unique=True)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        fail(index, f"weight_map: expected an object from tensor to file, got {kind(weight_map)}")
    for tensor, name in weight_map.items():
        _check_shard_name(index, tensor, name)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightFiles(tuple(sorted(set(weight_map.values()))), weight_map, total)


def _check_shard_name(index: Path, tensor: str, name: object) -> None:
    place = f"weight_map {shown(tensor)}"
    if not isinstance(name, str):
        fail(index, f"{place}: expected a file name, got {kind(name)}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or ":" in name or "\0" in name:
        fail(index, f"{place}: {shown(name)} lies outside the folder, which is not allowed")
    if not name.endswith(".safetensors"):
        fail(index, f"{place}: {shown(name)} is no safetensors file; convert the checkpoint to safetensors")


@dataclass(frozen=True)
class Merged:
    """All tensors of all shards."""

    tensors: dict[str, TensorEntry]
    seals: dict[str, Seal]
    """Seal of each shard."""
    warnings: list[str]
    """Disagreements of the index with the headers, which decide."""
    misplaced: tuple[str, ...]
    """Tensors that the index places in another shard than the one that holds them, or in none."""


def merge(path: Path, weights: WeightFiles) -> Merged:
    """All tensors, from the header of every shard. No values are read, except of tensors that several shards hold:
    these must be equal."""
    holders: dict[str, list[TensorEntry]] = {}
    seals: dict[str, Seal] = {}
    for shard in weights.shards:
        refuse_foreign_link(path, shard)
        tensors, seals[shard] = read_header(path / shard, shard)
        for name, entry in tensors.items():
            holders.setdefault(name, []).append(entry)
    for name, entries in holders.items():
        require_equal(path, name, entries)
    mapped = weights.weight_map
    if mapped is None:
        return Merged({name: entries[0] for name, entries in holders.items()}, seals, [], ())
    absent = [name for name in mapped if name not in holders]
    if absent:
        many = plural(len(absent), "tensor")
        fail(path / INDEX, f"weight_map: {many} missing from every shard: {listed(absent)}")
    tensors = {name: _chosen(entries, mapped.get(name)) for name, entries in holders.items()}
    misplaced = tuple(name for name, entry in tensors.items() if mapped.get(name) != entry.shard)
    return Merged(tensors, seals, _index_warnings(weights, holders, misplaced), misplaced)


def _chosen(entries: list[TensorEntry], mapped: str | None) -> TensorEntry:
    """The tensor in the shard that the index names, if several hold it."""
    return next((e for e in entries if e.shard == mapped), entries[0])


def _index_warnings(
    weights: WeightFiles, holders: dict[str, list[TensorEntry]], misplaced: tuple[str, ...]
) -> list[str]:
    warnings = []
    if misplaced:
        warnings.append(f"{INDEX}: weight_map disagrees with the shards on {listed(list(misplaced))}; they decide")
    twice = [name for name, entries in holders.items() if len(entries) > 1]
    if twice:
        many = plural(len(twice), "tensor")
        warnings.append(f"{many} in more than one shard: {listed(twice)}; with equal values")
    size = sum(e.bytes for entries in holders.values() for e in entries)
    if weights.total_size not in (None, size):
        stated = shown(weights.total_size)
        warnings.append(f"{INDEX}: metadata.total_size is {stated}, but the shards hold {size} bytes")
    return warnings


def require_equal(folder: Path, name: str, entries: list[TensorEntry]) -> None:
    """Refuses a tensor that several files hold and that differs in shape, dtype or any byte; the error names two of
    them.

    transformers takes the last file that it reads, an index may name another, and nothing says which is meant.
    """
    for one, other in pairwise(entries):
        if (one.shape, one.dtype) != (other.shape, other.dtype) or not _equal_bytes(folder, one, other):
            fail(folder / one.shard, f"tensor {shown(name)} has other values in {shown(other.shard)}, and readers "
                 "differ in which file they take: delete the stale file, or save the checkpoint again")  # fmt: skip


def _equal_bytes(folder: Path, one: TensorEntry, other: TensorEntry) -> bool:
    return all(a == b for a, b in zip(_chunks(folder, one), _chunks(folder, other), strict=True))


def _chunks(folder: Path, entry: TensorEntry) -> Iterator[bytes]:
    """The tensor's bytes in pieces of equal length; a file that ends early gives shorter ones."""
    with open_file(folder / entry.shard) as file:
        file.seek(entry.offset)
        for done in range(0, entry.bytes, CHUNK):
            yield file.read(min(CHUNK, entry.bytes - done))

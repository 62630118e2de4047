"""How a text becomes one vector, as sentence-transformers' files state it: modules, their configs and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from duat_cli.loading.checkpoint.files import fail, kind, open_file, read_json, read_list, refuse_foreign_link
from duat_cli.loading.checkpoint.index import WEIGHTS
from duat_cli.loading.checkpoint.preflight import single_file
from duat_cli.loading.checkpoint.stream import stream
from duat_cli.loading.declared.fields import MAX_BYTES, flat
from duat_cli.text import shown

MODULES = "modules.json"
TYPES, PATHS = f"{MODULES}.types", f"{MODULES}.paths"
_PICKLE = "pytorch_model.bin"  # hashed and never opened


@dataclass(frozen=True)
class Embedder:
    """Fields of the files, and facts about the weights behind the model."""

    fields: dict[str, Any] = field(default_factory=dict)
    """'1_Pooling/config.json.pooling_mode_cls_token' -> value; '3_Dense.weights' -> a digest of the values."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Weight file -> number of NaN and infinite values, for files that have some."""


@dataclass(frozen=True)
class Module:
    """An entry of modules.json."""

    type: str
    path: str
    """Path relative to the folder; '.' is the folder itself."""


def modules(folder: Path) -> list[Module] | None:
    """The modules in the order in which they run; None where there is no modules.json. CheckpointError names a
    fault."""
    path = folder / MODULES
    if not (path.exists() or path.is_symlink()):
        return None
    refuse_foreign_link(folder, MODULES)
    return [_module(path, number, one) for number, one in enumerate(read_list(path))]


def _module(where: Path, number: int, entry: dict[str, Any]) -> Module:
    for name in ("type", "path"):
        if not isinstance(entry.get(name), str):
            fail(where, f"module {number}: {name}: expected a text, got {kind(entry.get(name))}")
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts or any(c in entry["path"] for c in "\\:\0"):
        fail(where, f"module {number}: path: {shown(entry['path'])} lies outside the folder, which is not allowed")
    if entry["type"].endswith("Transformer") and path != PurePosixPath():
        fail(where, f"module {number}: path: the transformer is that of {shown(entry['path'])}, and not the one beside "
                    "modules.json, which is what duat reads: give that folder, or state its path as ''")  # fmt: skip
    return Module(entry["type"], str(path))


def embedder(folder: Path) -> Embedder:
    """All that the files state; empty where there are none. CheckpointError names a fault."""
    found, nonfinite = dict[str, Any](), dict[str, int]()
    stated = modules(folder)
    if stated is not None:
        found |= {TYPES: [one.type for one in stated], PATHS: [one.path for one in stated]}
    for path in sorted([*folder.glob("*sentence*.json"), *_configs(folder, stated)]):
        name = path.relative_to(folder).as_posix()
        refuse_foreign_link(folder, name)
        content = flat(read_json(path, limit=MAX_BYTES))
        found |= {f"{name}.{field}": value for field, value in content.items() if not field.startswith("__version__")}
    for place in _beside(stated):
        file = next((f for f in (WEIGHTS, _PICKLE) if (folder / place / f).exists()), None)
        if file is not None:
            refuse_foreign_link(folder, f"{place}/{file}")
            found[f"{place}.weights"], bad = _weights(folder / place, file)
            nonfinite |= {f"{place}/{file}": bad} if bad else {}
    return Embedder(found, nonfinite)


def _configs(folder: Path, stated: list[Module] | None) -> Iterator[Path]:
    """Config files of the modules behind the model; without modules.json, files of the usual names."""
    if stated is None:
        yield from folder.glob("[0-9]*_*/config.json")
        return
    for place in _beside(stated):
        path = folder / place / "config.json"
        if path.exists() or path.is_symlink():  # a module without settings has none
            yield path


def _beside(stated: list[Module] | None) -> list[str]:
    """Paths of the modules behind the model. Their folders lie in the model's."""
    return sorted({one.path for one in stated or ()} - {"."})


def _weights(folder: Path, file: str) -> tuple[str, int]:
    """(digest, number of NaN and infinite values). The digest covers the values, in whatever dtype they are stored; for
    a pickle, the bytes of the file."""
    if file == _PICKLE:
        with open_file(folder / file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16], 0  # type: ignore[arg-type]
    files = single_file(folder / file)
    digests, nonfinite = {name: hashlib.sha256(str(t.shape).encode()) for name, t in files.tensors.items()}, 0
    for tensor in stream(files):
        for piece in tensor.pieces:
            values = piece.values.astype(np.float64)
            nonfinite += values.size - int(np.isfinite(values).sum())
            digests[tensor.name].update(values.tobytes())
    whole = hashlib.sha256(repr(sorted((name, d.hexdigest()) for name, d in digests.items())).encode())
    return whole.hexdigest()[:16], nonfinite

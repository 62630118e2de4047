"""The cache folder: Gram matrices, one file per model (weights, class and config), and JSON documents, one file per
key.

A cache file that cannot be read or written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from duat_cli.compat.transformers import experts_implementation
from duat_cli.text import expanded

FORMAT = "4"  # to be raised when the content of the files, or the way it is computed, changes


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a model's arithmetic follows from, except its weights.

    The same weights under another config are another model: gemma's norms scale by 1 + gain, llama's by the gain.
    """
    cls = type(model)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": _without_paths(json.loads(model.config.to_json_string(use_diff=False))),
        "experts": experts_implementation(model),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items() if k not in ("_name_or_path", "name_or_path")}
    return [_without_paths(v) for v in value] if isinstance(value, list) else value


def gram_key(fingerprint: str, model: PreTrainedModel) -> str:
    """A hash of everything that a Gram matrix follows from."""
    return hashlib.sha256(json.dumps([fingerprint, identity(model)], sort_keys=True).encode()).hexdigest()[:40]


def cache_folder() -> Path:
    """$DUAT_CACHE, or duat/ in the user's cache folder."""
    if folder := os.environ.get("DUAT_CACHE"):
        return expanded(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duat"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a file to write, which replaces `path` once it is complete; after an error no file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


class TensorCache:
    """Named tensors of one key; read when it is created, written back by `save` if tensors were added."""

    def __init__(self, key: str, *, enabled: bool = True) -> None:
        self._path = cache_folder() / f"gram-{FORMAT}-{key}.safetensors"
        self._enabled, self._changed = enabled, False
        self._tensors: dict[str, Tensor] = {}
        if enabled and self._path.is_file():
            with contextlib.suppress(OSError, SafetensorError, ValueError):
                self._tensors = load_file(self._path)

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def put(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.detach().cpu().contiguous()
        self._changed = True

    def save(self) -> None:
        """Writes the file completely or not at all."""
        if not (self._enabled and self._changed):
            return
        with contextlib.suppress(OSError, SafetensorError), replacing(self._path) as part:
            save_file(self._tensors, part)
            self._changed = False


class DocumentCache:
    """Documents of one kind, by key. The key is stored with each document and compared on reading."""

    def __init__(self, kind: str, *, enabled: bool = True) -> None:
        self._kind, self._enabled = kind, enabled

    def get(self, key: Mapping[str, Any]) -> Any:
        """The document of a key; None where there is none."""
        if not self._enabled:
            return None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("key") == _plain(key):
                return found.get("document")
        return None

    def put(self, key: Mapping[str, Any], document: Any) -> None:
        """Writes the file completely or not at all."""
        if not self._enabled:
            return
        with contextlib.suppress(OSError, ValueError), replacing(self._path(key)) as part:
            text = json.dumps({"key": _plain(key), "document": document}, allow_nan=False)
            part.write_text(text, encoding="utf-8")

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return cache_folder() / f"{self._kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    """The key as it is after a round trip through JSON."""
    return json.loads(json.dumps(key, sort_keys=True))

"""Gram matrices on disk, one file a model: weights, class and config. A file that cannot be read is no error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

FORMAT = "2"  # raise it when what is stored, or how it is computed, changes


_NO_PART_OF_THE_MODEL = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}


def model_key(fingerprint: str, model: PreTrainedModel) -> str:
    """A hash of all that a Gram matrix follows from: weights, class, resolved config, dtype, and the libraries.

    The same weights under another config are another model: gemma's norms scale by 1 + gain, llama's by the gain.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_PART_OF_THE_MODEL}
    cls = type(model)
    parts = [fingerprint, cls.__module__, cls.__qualname__, config, str(model.dtype), transformers.__version__,
             torch.__version__]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def cache_folder() -> Path:
    """$DUAT_CACHE, or duat/ in the user's cache folder."""
    if folder := os.environ.get("DUAT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duat"


class TensorCache:
    """Named tensors of one key; read at once, written back by `save` if anything was added."""

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
        """Write the file whole or not at all."""
        if not (self._enabled and self._changed):
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            os.close(handle)
            try:
                save_file(self._tensors, name)
                os.replace(name, self._path)
                self._changed = False
            except (OSError, SafetensorError):
                Path(name).unlink(missing_ok=True)

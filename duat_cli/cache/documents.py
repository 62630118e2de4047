"""JSON documents in the cache folder, one file a key. A document that cannot be read or written is no error."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duat_cli.cache.tensors import cache_folder, replacing


class DocumentCache:
    """Documents of one kind by key; the key is stored with each and compared on reading."""

    def __init__(self, kind: str, *, enabled: bool = True) -> None:
        self._kind, self._enabled = kind, enabled

    def get(self, key: Mapping[str, Any]) -> Any:
        """None where there is none."""
        if not self._enabled:
            return None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("key") == _plain(key):
                return found.get("document")
        return None

    def put(self, key: Mapping[str, Any], document: Any) -> None:
        """Write the file whole or not at all."""
        if not self._enabled:
            return
        with contextlib.suppress(OSError, ValueError), replacing(self._path(key)) as part:
            text = json.dumps({"key": _plain(key), "document": document}, allow_nan=False)
            part.write_text(text, encoding="utf-8")

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return cache_folder() / f"{self._kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key, sort_keys=True))

"""Files of a checkpoint read as untrusted input: what is no regular file, no JSON or no content is said so."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from duat_cli.errors import CheckpointError
from duat_cli.text import clean

_MAX_JSON_BYTES = 256 << 20  # the index of the largest public checkpoints is below 10 MB
_LFS = b"version https://git-lfs"


def fail(where: Path, text: str) -> NoReturn:
    """Refuses the checkpoint: which file, and what is wrong with it."""
    raise CheckpointError(f"{clean(str(where))}: {text}")


def open_file(path: Path) -> BinaryIO:
    """A regular file opened for reading; links are followed, as the hub cache is made of them."""
    try:
        # a named pipe would make open() wait for ever
        if not stat.S_ISREG(path.stat().st_mode):
            fail(path, "is no regular file")
        return path.open("rb")
    except FileNotFoundError:
        if path.is_symlink():
            fail(path, "is a dangling symlink (an interrupted download or a pruned cache): fetch it again")
        fail(path, "missing: no such file")
    except (OSError, ValueError) as error:
        fail(path, f"cannot be read: {_reason(error)}")


def _reason(error: Exception) -> str:
    return clean(getattr(error, "strerror", None) or str(error))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file, or the reason why the file is none."""
    with open_file(path) as file:
        raw = file.read(_MAX_JSON_BYTES + 1)
    if len(raw) > _MAX_JSON_BYTES:
        fail(path, f"more than {_MAX_JSON_BYTES} bytes; expected a JSON text")
    refuse_pointer(path, raw)
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        fail(path, f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; save it as UTF-8")
    except json.JSONDecodeError as error:
        fail(path, f"not JSON: {clean(error.msg)} at line {error.lineno}, of {len(raw)} bytes: truncated?")
    except (ValueError, RecursionError) as error:
        fail(path, f"not usable JSON: {clean(str(error))}")
    if not isinstance(value, dict):
        fail(path, f"expected a JSON object, got {type(value).__name__}")
    return value


def refuse_pointer(path: Path, start: bytes) -> None:
    """What git leaves in the place of a large file that was not fetched."""
    if start.startswith(_LFS):
        size = re.search(rb"\nsize (\d{1,20})", start)
        missing = f"{size[1].decode()} bytes" if size else "content"
        fail(path, f"is a git-lfs pointer ({missing} not fetched): run 'git lfs pull'")


def kind(value: object) -> str:
    """What stands in the place of something else."""
    return "none" if value is None else f"{'an empty ' if not value else ''}{type(value).__name__}"

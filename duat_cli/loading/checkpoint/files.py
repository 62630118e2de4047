"""Files of a checkpoint, read as untrusted input: errors say what is no regular file, no JSON, or a pointer without
content."""

from __future__ import annotations

import codecs
import difflib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from duat_cli.errors import CheckpointError
from duat_cli.text import clean, shown

_MAX_JSON_BYTES = 256 << 20  # tokenizers are the largest, with tens of MB
_LONGEST_NAME = 256  # characters of a file's name; a longer one is like none, and comparing takes quadratic time
_LFS = re.compile(rb"\s*(?:\xef\xbb\xbf)?version https?://(?:git-lfs\.github\.com|hawser\.github\.com|git-media\.io)/")
# names made from the content, as the hub's cache, git-annex and other stores of large files have them
_BY_CONTENT = re.compile(r"[0-9a-f]{30,128}|(?:SHA|MD5)[0-9A-Z]*-.*")


def fail(where: Path, text: str) -> NoReturn:
    """Raises CheckpointError, which names the file and what is wrong with it."""
    raise CheckpointError(f"{clean(str(where))}: {text}")


def near_folder(path: Path) -> str:
    """'; near it is ...' if a folder beside a path that does not exist has a similar name; else empty."""
    try:
        beside = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return ""
    found = difflib.get_close_matches(path.name, beside, 1) if len(path.name) < _LONGEST_NAME else []
    return f"; near it is {shown(str(path.parent / found[0]))}" if found else ""


def plain_mode(folder: bool = False) -> int:
    """The permissions that a plain write gives; only the owner may read temporary files."""
    mask = os.umask(0o077)
    os.umask(mask)
    return (0o777 if folder else 0o666) & ~mask


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened for reading; links are followed, because the hub's cache consists of them."""
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
        fail(path, f"cannot be read: {clean(getattr(error, 'strerror', None) or str(error))}")


def read_into(path: Path, file: BinaryIO, offset: int, view: memoryview, tensor: str) -> None:
    """Fills `view` with the bytes of an open file from `offset` on; CheckpointError where the file ends before."""
    done = 0
    try:
        file.seek(offset)
        while done < len(view):
            got = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                fail(path, f"ended within tensor {tensor}: it became shorter while it was read")
            done += got
    except OSError as error:
        fail(path, f"tensor {tensor} cannot be read: {error.strerror or error}")


def refuse_foreign_link(folder: Path, name: str) -> None:
    """Refuses a link out of the folder, except into a store of large files such as the hub's cache."""
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):
        return  # reading it will say why
    stored = real.parent.name == "blobs" or _BY_CONTENT.fullmatch(real.name)
    if real.exists() and not real.is_relative_to(home) and not stored:
        fail(folder / name, f"is a symlink to {shown(real)}, outside the folder, which is not allowed: copy the file")


def read_json(path: Path, *, limit: int = _MAX_JSON_BYTES, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError says why there is none. unique: whether a key that appears twice must
    have equal values."""
    value = _parsed(path, limit, unique=unique)
    if not isinstance(value, dict):
        fail(path, f"expected a JSON object, got {type(value).__name__}")
    return value


def read_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in a file; CheckpointError says why there is none."""
    value = _parsed(path, _MAX_JSON_BYTES, unique=False)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        fail(path, f"expected a JSON list of objects, got {type(value).__name__}")
    return value


def _parsed(path: Path, limit: int, *, unique: bool) -> Any:
    with open_file(path) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        fail(path, f"more than {limit} bytes, too large for what it is; expected a JSON text")
    refuse_pointer(path, raw)
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_agreeing if unique else None)
    except UnicodeDecodeError as error:
        fail(path, f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; save it as UTF-8")
    except json.JSONDecodeError as error:
        if raw.startswith(codecs.BOM_UTF8):
            fail(path, "begins with a byte order mark (BOM); save it as UTF-8 without one")
        fail(path, f"not JSON: {clean(error.msg)} at line {error.lineno}, of {len(raw)} bytes: truncated?")
    except (ValueError, RecursionError) as error:
        fail(path, f"not usable JSON: {clean(str(error))}")


def _agreeing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of the pairs; ValueError for equal keys with different values. Python keeps the last of them, other
    readers the first, so nobody can tell which is meant."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"key {shown(key)} stands twice, with different values")
        found[key] = value
    return found


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuses the pointer that git leaves in the place of a large file that was not fetched."""
    if _LFS.match(start):
        size = re.search(rb"\nsize (\d{1,20})", start)
        missing = f"{size[1].decode()} bytes" if size else "content"
        fail(path, f"is a git-lfs pointer ({missing} not fetched): run 'git lfs pull'")


def kind(value: object) -> str:
    """The kind of a value that is not the expected one, for messages."""
    return "none" if value is None else f"{'an empty ' if not value else ''}{type(value).__name__}"

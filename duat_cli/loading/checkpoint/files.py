"""Files of a checkpoint read as untrusted input: what is no regular file, no JSON or no content is said so."""

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
_LONGEST_NAME = 256  # of a file; a longer one is like none, and comparing is quadratic
_LFS = re.compile(rb"\s*(?:\xef\xbb\xbf)?version https?://(?:git-lfs\.github\.com|hawser\.github\.com|git-media\.io)/")
# names by content, as the hub's cache, git-annex and other stores of large files have them
_BY_CONTENT = re.compile(r"[0-9a-f]{30,128}|(?:SHA|MD5)[0-9A-Z]*-.*")


def fail(where: Path, text: str) -> NoReturn:
    """Refuses the checkpoint: which file, and what is wrong with it."""
    raise CheckpointError(f"{clean(str(where))}: {text}")


def near_folder(path: Path) -> str:
    """'; near it is ...', where a folder beside a path that does not exist has nearly its name; else empty."""
    try:
        beside = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return ""
    found = difflib.get_close_matches(path.name, beside, 1) if len(path.name) < _LONGEST_NAME else []
    return f"; near it is {shown(str(path.parent / found[0]))}" if found else ""


def plain_mode(folder: bool = False) -> int:
    """The permissions that a plain write gives; temporary files are their owner's alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return (0o777 if folder else 0o666) & ~mask


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
        fail(path, f"cannot be read: {clean(getattr(error, 'strerror', None) or str(error))}")


def read_into(path: Path, file: BinaryIO, offset: int, view: memoryview, tensor: str) -> None:
    """Fill `view` with the bytes of an open file from `offset` on; CheckpointError where it ends before."""
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
    """A link out of the folder, other than into a store of large files such as the hub's cache."""
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):
        return  # reading it will say why
    stored = real.parent.name == "blobs" or _BY_CONTENT.fullmatch(real.name)
    if real.exists() and not real.is_relative_to(home) and not stored:
        fail(folder / name, f"is a symlink to {shown(real)}, outside the folder, which is not allowed: copy the file")


def read_json(path: Path, *, limit: int = _MAX_JSON_BYTES, unique: bool = False) -> dict[str, Any]:
    """A JSON object of a file, or the reason why the file is none. unique: equal keys must have equal values."""
    value = _parsed(path, limit, unique=unique)
    if not isinstance(value, dict):
        fail(path, f"expected a JSON object, got {type(value).__name__}")
    return value


def read_list(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects of a file, or the reason why the file is none."""
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
    """Python keeps the last of two equal keys, other readers the first: nobody can tell which is meant."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"key {shown(key)} stands twice, with different values")
        found[key] = value
    return found


def refuse_pointer(path: Path, start: bytes) -> None:
    """What git leaves in the place of a large file that was not fetched."""
    if _LFS.match(start):
        size = re.search(rb"\nsize (\d{1,20})", start)
        missing = f"{size[1].decode()} bytes" if size else "content"
        fail(path, f"is a git-lfs pointer ({missing} not fetched): run 'git lfs pull'")


def kind(value: object) -> str:
    """What stands in the place of something else."""
    return "none" if value is None else f"{'an empty ' if not value else ''}{type(value).__name__}"

"""A folder of results: a manifest, the keys and batches of the prompts, one shard per process, and further files of a
command.

A prompt is identified by the hash of its text and by its position in the set, since a text may be there twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pydantic

from duat_cli import __version__
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.shards import records
from duat_cli.analysis.shards.names import KEYS, LEADERS, MANIFEST
from duat_cli.analysis.shards.ranks import Ranks, owners
from duat_cli.analysis.shards.records import Aside, Manifest, PromptRecord
from duat_cli.analysis.shards.shard import Shard, is_held, shard
from duat_cli.cache.tensors import replacing
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.files import plain_mode
from duat_cli.loading.prompt_set import digest_of, key_of
from duat_cli.results.base import PromptFacts
from duat_cli.text import clean, one_line, plural, some

_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.jsonl")
_NOWHERE = -1
_NAMED = 3  # how many ranks a message names
A = TypeVar("A", bound=Aside)
P = TypeVar("P", bound=PromptRecord)


@dataclass
class Index:
    """The place of every prompt's line. Arrays go by the positions of the prompts."""

    shards: list[Path]
    shard: array[int]
    """Number of the shard with the line."""
    offset: array[int]
    """Offset of the line in the shard; -1 for a prompt without a result yet."""
    tokens: array[int]
    """How many tokens the prompt has; 0 without a result."""
    found: int = 0

    def has(self, position: int) -> bool:
        return self.offset[position] != _NOWHERE

    def counts(self) -> set[int]:
        """The distinct counts of tokens of the prompts that have a result."""
        return {tokens for tokens in self.tokens if tokens}


class Folder:
    """Results of one model on one set of prompts with one set of options."""

    def __init__(self, path: Path, manifest: Manifest, keys: array[int], leaders: array[int]) -> None:
        self.path, self.manifest, self.keys, self.leaders = path, manifest, keys, leaders
        self.seal = manifest.seal()

    # -- opening -----------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, manifest: Manifest, keys: array[int], leaders: array[int]) -> Folder:
        """Opens a folder to add results. Raises InputError if it holds results of another manifest. leaders: as for
        `owners`."""
        with _faults(path, "cannot write"):
            path.mkdir(parents=True, exist_ok=True)
            _create(path / MANIFEST, manifest)
            theirs = _manifest(path)
            for (what, there), here in zip(theirs.same().items(), manifest.same().values(), strict=False):
                if there != here:
                    raise InputError(
                        f"--out {clean(str(path))}: holds results of another {what}, {_told(there)} there, "
                        f"{_told(here)} here; give another folder"
                    )
            _put(path / KEYS, keys.tobytes())
            _put(path / LEADERS, leaders.tobytes())
        return cls(path, theirs, keys, leaders)

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Opens a folder to merge its results."""
        with _faults(path, "cannot be read"):
            manifest = _manifest(path)
            keys, leaders = array("Q"), array("I")
            keys.frombytes(_bytes(path / KEYS))
            leaders.frombytes(_bytes(path / LEADERS))
        if digest_of(keys) != manifest.prompt_set or len(leaders) != len(keys):
            raise InputError(f"{clean(str(path / KEYS))}: is not that of the manifest; run the same command again")
        return cls(path, manifest, keys, leaders)

    # -- results -----------------------------------------------------------------------------------------

    def shard(self, ranks: Ranks) -> AbstractContextManager[Shard]:
        """The shard of this process. Raises InputError while another process has it."""
        return shard(self._shard(ranks.rank, ranks.world), ranks)

    def held(self, world: int) -> list[int]:
        """The ranks whose processes are running."""
        return [rank for rank in range(world) if is_held(self._shard(rank, world))]

    def _shard(self, rank: int, world: int) -> Path:
        return self.path / f"shard-{rank}-of-{world}.jsonl"

    def index(self) -> Index:
        """The index of all whole lines; if a prompt has several, always the same one of them."""
        count = len(self.keys)
        paths = sorted(p for p in self.path.iterdir() if _NAME.fullmatch(p.name))
        index = Index(paths, array("I", [0]) * count, array("q", [_NOWHERE]) * count, array("I", [0]) * count)
        for number, path in enumerate(paths):
            offset = 0
            _require_file(path)
            with path.open("rb") as file:
                for raw in file:
                    line = records.read(self.seal, raw)
                    if line is not None and not index.has(line.position):
                        assert key_of(line.sha256) == self.keys[line.position]  # the seal covers both
                        index.shard[line.position] = number
                        index.offset[line.position] = offset
                        index.tokens[line.position] = line.tokens
                        index.found += 1
                    offset += len(raw)
        return index

    def lines(self, index: Index) -> Iterator[records.Line]:
        """The lines of all prompts, by position."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in index.shards]
            for number, offset in zip(index.shard, index.offset, strict=True):
                files[number].seek(offset)
                line = records.read(self.seal, files[number].readline())
                if line is None:
                    raise InputError(f"{clean(str(index.shards[number]))}: changed while it was read; run again")
                yield line

    def each(
        self, index: Index, kind: type[P], progress: Progress, what: str = "adding up the prompts"
    ) -> Iterator[tuple[PromptFacts, P]]:
        """Facts and record of every prompt, by position, with progress."""
        for done, line in enumerate(self.lines(index), 1):
            try:
                record = kind.model_validate_json(line.record)
            except pydantic.ValidationError as error:
                what = f"what it holds of prompt {line.position + 1} is of another state of duat"
                raise InputError(f"{clean(str(self.path))}: {what}; give another folder") from error
            yield PromptFacts(sha256=line.sha256, tokens=line.tokens), record
            progress(done, index.found, what)

    def complete(self) -> Index:
        """The index of all prompts. Raises InputError, which says what is missing, unless every prompt has a result."""
        index = self.index()
        if index.found < len(self.keys):
            raise InputError(self.missing(index, self.last_world()))
        return index

    def missing(self, index: Index, world: int) -> str:
        """A message on which of `world` processes left work undone, and what to do."""
        own, done = [0] * world, [0] * world
        for position, rank in enumerate(owners(self.keys, self.leaders, world)):
            own[rank] += 1
            done[rank] += index.has(position)
        living = self.held(world)
        parts = [
            f"{Ranks(rank, world)}'s shard ends after {done[rank]} of its {own[rank]} prompts"
            + (", still at work" if rank in living else "")
            for rank in range(world)
            if done[rank] < own[rank]
        ]
        count = plural(len(self.keys) - index.found, "prompt")
        return f"{self.path}: {some(parts, _NAMED, '; ', ', and ')}; missing {count}: run the same command again"

    def last_world(self) -> int:
        """How many processes the last run had."""
        found = [(p.stat().st_mtime, int(m[2])) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name))]
        return max(found, default=(0.0, 1))[1]

    # -- beside the prompts ------------------------------------------------------------------------------

    def aside(self, name: str, kind: type[A]) -> A | None:
        """Content of a further file of the command; None where there is none of this manifest yet."""
        _require_file(self.path / name)
        with contextlib.suppress(OSError, ValueError):
            found = kind.model_validate_json((self.path / name).read_bytes())
            return found if found.seal == self.seal.hex() else None
        return None

    def kept_aside(self, name: str, kind: type[A], missing: str) -> A:
        """`aside` of a file that the report needs. missing: says what is not there, for the InputError."""
        found = self.aside(name, kind)
        if found is None:
            raise InputError(f"{self.path}: {missing}: run the same command again")
        return found

    def put_aside(self, name: str, found: Aside) -> None:
        """Writes a further file of the command, with the manifest's seal, whole or not at all."""
        sealed = found.model_copy(update={"seal": self.seal.hex()})
        with _faults(self.path, "cannot write"):
            _put(self.path / name, sealed.model_dump_json().encode())


def _put(path: Path, raw: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(raw)
        part.chmod(plain_mode())


def _create(path: Path, manifest: Manifest) -> None:
    """Writes the manifest as a whole, and only if there is none: unlike a rename, a link does not replace a file. Where
    a file system has no links (exFAT, some network shares), the file is written in place, where only the first process
    can create it."""
    text = manifest.model_dump_json(indent=1)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(plain_mode())
        try:
            os.link(name, path)
        except FileExistsError:
            pass
        except OSError:
            with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                file.write(text)
    finally:
        Path(name).unlink()


def _bytes(path: Path) -> bytes:
    _require_file(path)
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{clean(str(path))}: missing; run the same command again") from error


def _require_file(path: Path) -> None:
    """Raises InputError if something that is no regular file has this name; reading a named pipe would never end."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"{clean(str(path))}: is {what}, expected the file that --out wrote; give another folder")


def _manifest(path: Path) -> Manifest:
    _require_file(path / MANIFEST)
    try:
        raw = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"has no {MANIFEST}" if path.is_dir() else "is no folder" if path.exists() else "no such folder"
        expected = "expected a folder that --out of a command wrote"
        raise InputError(f"{clean(str(path))}: {what}; {expected}") from error
    try:
        version = json.loads(raw)["duat_version"]
        if version != __version__:
            raise InputError(f"{clean(str(path))}: holds results of duat {version}, this is {__version__}")
        return Manifest.model_validate_json(raw)
    except (ValueError, KeyError, TypeError, pydantic.ValidationError) as error:
        raise InputError(f"{clean(str(path / MANIFEST))}: no manifest of duat's; give another folder") from error


@contextlib.contextmanager
def _faults(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{clean(str(error.filename or path))}: {what}: {error.strerror or error}") from error


def _told(value: object) -> str:
    """A setting as a user gave it; a flag is "given" or "not given"."""
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    return one_line(str(value), 40)

"""The file of one process: whole lines, whatever happens, and one writer."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from duat_cli.analysis.shards import shard as module
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.shard import is_held, shard
from duat_cli.errors import InputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard-0-of-1.jsonl"


def test_lines_are_appended(path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with shard(path, Ranks()) as mine:
            mine.append(line)
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("torn", [b"", b"x", b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b"one\n", b"one\n" + b"y" * 100_000 + b"\n"])
def test_a_line_that_was_cut_off_goes(path: Path, whole: bytes, torn: bytes) -> None:
    path.write_bytes(whole + torn)
    with shard(path, Ranks()) as mine:
        mine.append(b"next\n")
    assert path.read_bytes() == whole + b"next\n"


def test_a_second_writer_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    assert not is_held(path)
    with shard(path, Ranks()) as mine:
        mine.append(b"one\n")
        assert is_held(path)
        with pytest.raises(InputError, match="another process is writing it as rank 0 of 1"), shard(path, Ranks()):
            pass
        mine.append(b"two\n")
    assert not is_held(path)
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_full_disk_leaves_what_was_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with shard(path, Ranks()) as mine:
        mine.append(b"one\n")
        monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:2]))
        with pytest.raises(InputError, match="No space left"):
            mine.append(b"two\n")
        monkeypatch.undo()
        mine.append(b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_file_that_cannot_be_had_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot write: No such file"), shard(path.parent / "no" / "shard", Ranks()):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(InputError, match="cannot be locked: No locks available"), shard(path, Ranks()):
        pass

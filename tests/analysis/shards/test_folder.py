"""A folder of results: whose it is, what is in it, and whom it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.inspect import null_of, put_null
from duat_cli.analysis.shards.names import KEYS, MANIFEST
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.errors import InputError

Into = Callable[..., Any]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("few") / "few.txt"
    file.write_text("one\ntwo\nthree\ntwo\n")
    return file


@pytest.fixture(scope="module")
def written(into: Into, few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "out"
    into(out, prompts=few)
    return out


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "out"))


def test_every_prompt_has_its_line(folder: Path) -> None:
    found = Folder.read(folder)
    index = found.index()
    assert index.found == 4
    assert list(index.tokens) == [3, 3, 5, 3]
    assert index.counts() == {3, 5}
    lines = list(found.lines(index))
    assert [line.position for line in lines] == [0, 1, 2, 3]
    assert lines[1].sha256 == lines[3].sha256  # the same text twice is two prompts
    [shard] = [p for p in folder.iterdir() if p.suffix == ".jsonl"]
    assert [json.loads(raw)["record"]["text"] for raw in shard.open()] == ["one", "two", "three", "two"]


def test_of_the_same_line_in_two_shards_one_counts(folder: Path) -> None:
    shutil.copy(folder / "shard-0-of-1.jsonl", folder / "shard-1-of-2.jsonl")
    (folder / "shard-9-of-2.jsonl.part").write_text("no shard")
    index = Folder.read(folder).index()
    assert (index.found, len(index.shards), set(index.shard)) == (4, 2, {0})


def test_a_line_that_was_changed_is_missing(folder: Path) -> None:
    file = folder / "shard-0-of-1.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b'"text":"two"', b'"text":"six"') + lines[2] + lines[3][:-9])
    index = Folder.read(folder).index()
    assert [index.has(k) for k in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float64"}, "dtype, float32 there, float64 here"),
        ({"threshold": 0.5}, "--threshold, 0.01 there, 0.5 here"),
        ({"terms": True}, "--terms, not given there, given here"),
        ({"layers": frozenset({1})}, r"--layers, \[0, 1\] there, \[1\] here"),
        ({"max_tokens": 2}, "--max-tokens, not given there, 2 here"),
        ({"null": "all"}, "--null, uniform there, all here"),
    ],
)
def test_other_options_are_refused(folder: Path, few: Path, into: Into, options: dict[str, Any], said: str) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(InputError, match=f"--out .*: holds results of another {said}; give another folder"):
        into(folder, prompts=few, **options)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("texts", ["one\ntwo\nthree\n", "two\none\nthree\ntwo\n"])
def test_another_prompt_set_is_refused(folder: Path, into: Into, tmp_path: Path, texts: str) -> None:
    (tmp_path / "other.txt").write_text(texts)
    with pytest.raises(InputError, match="holds results of another prompt set"):
        into(folder, prompts=tmp_path / "other.txt")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_another_model_is_refused(
    folder: Path, few: Path, into: Into, two_layers: Path, tmp_path: Path, file: str
) -> None:
    from safetensors.torch import load_file, save_file

    kept = tmp_path / "kept"
    shutil.copy(two_layers / file, kept)
    try:
        if file == "model.safetensors":
            weights = load_file(two_layers / file)
            weights["model.norm.weight"] *= 1.5
            save_file(weights, two_layers / file, {"format": "pt"})
        else:
            stated = json.loads((two_layers / file).read_text())
            changed = {"rms_norm_eps": 1e-3} if file == "config.json" else {"clean_up_tokenization_spaces": True}
            (two_layers / file).write_text(json.dumps(stated | changed))
        what = {"model.safetensors": "model", "config.json": "config"}.get(file, "tokenizer")
        with pytest.raises(InputError, match=f"holds results of another {what},"):
            into(folder, prompts=few)
    finally:
        shutil.copy(kept, two_layers / file)


def test_another_version_of_duat_is_refused(folder: Path, few: Path, into: Into) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"duat_version": "0.0.1", "new": 1}))
    for act in (lambda: into(folder, prompts=few), lambda: Folder.read(folder)):
        with pytest.raises(InputError, match=r"holds results of duat 0\.0\.1, this is"):
            act()


@pytest.mark.parametrize("raw", ["", "[]", "{}", '{"duat_version": 1}', "\x00"])
def test_what_is_no_manifest_is_refused(folder: Path, raw: str) -> None:
    (folder / MANIFEST).write_text(raw)
    with pytest.raises(InputError, match=r"no manifest of duat's|holds results of duat"):
        Folder.read(folder)


def test_a_folder_that_cannot_be_read(tmp_path: Path, folder: Path, into: Into, few: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: no such folder; expected a folder that --out"):
        Folder.read(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"other: has no manifest\.json; expected a folder that --out"):
        Folder.read(tmp_path / "other")
    (folder / KEYS).write_bytes(os.urandom(32))
    with pytest.raises(InputError, match=r"prompts\.keys: is not that of the manifest"):
        Folder.read(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: is no folder; expected a folder that --out"):
        Folder.read(tmp_path / "file")
    with pytest.raises(InputError, match=r"file: cannot write: (File exists|Not a directory)"):
        into(tmp_path / "file", prompts=few)


@pytest.mark.parametrize("name", [MANIFEST, KEYS, "shard-0-of-1.jsonl"])
@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "no regular file"), (os.mkdir, "a folder")])
def test_a_pipe_is_not_waited_for(make: Callable[[Path], None], what: str, name: str, folder: Path) -> None:
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(InputError, match=f"{name}: is {what}, expected the file that --out wrote; give another folder"):
        Folder.read(folder).index()


def test_a_file_that_is_gone_is_made_by_the_same_command(folder: Path) -> None:
    (folder / KEYS).unlink()
    with pytest.raises(InputError, match=f"{KEYS}: missing; run the same command again"):
        Folder.read(folder)


def test_lines_of_another_manifest_do_not_count(folder: Path, into: Into, few: Path) -> None:
    """Somebody removes the manifest to be let in: the numbers that are there are not taken for the new options'."""
    (folder / MANIFEST).unlink()
    report = into(folder, prompts=few, threshold=0.5)
    assert report is not None
    assert {block.density.threshold for block in report.blocks} == {0.5}
    assert len((folder / "shard-0-of-1.jsonl").read_bytes().splitlines()) == 8


def test_a_null_belongs_to_its_manifest(folder: Path) -> None:
    found = Folder.read(folder)
    assert null_of(found, 3) is None
    put_null(found, 3, "it cannot be built")
    null = null_of(found, 3)
    assert null is not None
    assert null.found == "it cannot be built"
    found.seal = bytes(32)
    assert null_of(found, 3) is None


def test_the_last_run_says_how_many_processes_there_were(folder: Path, into: Into, few: Path) -> None:
    assert Folder.read(folder).last_world() == 1
    os.utime(folder / "shard-0-of-1.jsonl", (0, 0))
    into(folder, Ranks(1, 3), prompts=few)
    assert Folder.read(folder).last_world() == 3


def test_a_file_system_without_links(into: Into, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    into(tmp_path / "kept", prompts=few)
    assert sorted(p.suffix for p in (tmp_path / "kept").iterdir() if p.suffix == ".part") == []
    assert json.loads((tmp_path / "kept" / MANIFEST).read_text())
    into(tmp_path / "kept", prompts=few)  # it is taken up

"""The report of a folder: its nulls and its certificate, and what is said where something is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duat_cli.analysis.clock import Clock
from duat_cli.analysis.shards import inspect as shards_inspect
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.inspect import InspectRecord, put_null
from duat_cli.analysis.shards.lora import LoraRecord
from duat_cli.analysis.shards.merge import merge
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.records import written
from duat_cli.analysis.shards.shard import shard
from duat_cli.errors import InputError
from duat_cli.results import prompts
from duat_cli.results.inspect import InspectReport

Into = Callable[..., Any]


def quiet(done: int, total: int, doing: str) -> None:
    pass


def merged(folder: Path) -> InspectReport:
    found = merge(Folder.read(folder), Clock().run, quiet)
    assert isinstance(found, InspectReport)
    return found


def test_every_null_has_to_be_there(into: Into, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = into(out, null="all")
    assert merged(out).blocks == whole.blocks
    assert all(block.null.reinitialised is not None for block in whole.blocks)
    [first, *_] = sorted(out.glob("null-*.json"))
    first.unlink()
    with pytest.raises(InputError, match="the null of 5 tokens is missing: run the same command again"):
        merged(out)
    assert into(out, null="all").blocks == whole.blocks


def test_where_one_null_has_failed_none_is_shown(into: Into, tmp_path: Path) -> None:
    """As in a report of one process."""
    out = tmp_path / "out"
    into(out, null="all")
    put_null(Folder.read(out), 7, "the architecture was not re-initialised: because")
    for block in merged(out).blocks:
        assert block.null.uniform is not None
        assert block.null.reasons == {"reinitialised": "the architecture was not re-initialised: because"}


def test_what_heads_read_is_kept(into: Into, tmp_path: Path) -> None:
    whole = into(tmp_path / "out", heads=True)
    assert merged(tmp_path / "out").blocks == whole.blocks
    assert all(block.heads is not None and block.heads.induction_rows for block in whole.blocks)


def test_one_inexact_prompt_is_seen(into: Into, tmp_path: Path) -> None:
    """By the worst error, and of any process's comparison with the model that has no instruments."""
    out = tmp_path / "out"
    assert into(out).certificate.exact
    folder = Folder.read(out)
    file = out / "shard-0-of-1.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    record = InspectRecord.model_validate(json.loads(lines[5])["record"])
    [line] = [line for line in folder.lines(folder.index()) if line.position == 5]
    prompt = type("P", (), {"sha256": line.sha256})
    inexact = dataclasses.replace(record.found, errors=[1e-7, 0.5])
    for fault, size in (({"found": inexact}, 0.5), ({"plain_error": 0.25}, 0.25)):
        lines[5] = written(folder.seal, 5, prompt, record.model_copy(update=fault))  # type: ignore[arg-type]
        file.write_bytes(b"".join(lines))
        certificate = merged(out).certificate
        assert not certificate.exact
        assert max(certificate.relative_error, certificate.plain_error) == size


def test_a_record_of_other_fields_is_named(into: Into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of the same version number, but of an earlier state of the code."""
    out = tmp_path / "out"
    into(out)
    monkeypatch.setattr(shards_inspect, "InspectRecord", LoraRecord)
    with pytest.raises(InputError, match="what it holds of prompt 1 is of another state of duat; give another folder"):
        merged(out)


def test_many_prompts_are_a_set(
    two_layers: Path, few: Path, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computed them, and without --out; of a few texts every prompt is listed."""
    words = ["inspect", str(two_layers), "--prompts", str(few), "--device", "cpu", "--null", "uniform", "--no-cache"]
    whole = json.loads(ask(*words))
    monkeypatch.setattr(prompts, "LISTED", 5)
    monkeypatch.setattr(prompts, "FIRST", 2)
    plain = ask(*words)
    assert ask(*words, "--out", str(tmp_path / "one")) == ask("merge", str(tmp_path / "one")) == plain
    for rank in (1, 0):
        found = ask(*words, "--out", str(tmp_path / "two"), rank=rank)
    assert found == ask("merge", str(tmp_path / "two")) == plain
    short = json.loads(plain)
    assert short["prompt_set"]["count"] == len(whole["prompts"]) == 6
    assert short["prompt_set"]["tokens"] == sum(prompt["tokens"] for prompt in whole["prompts"])
    assert short["prompts"] == whole["prompts"][: prompts.FIRST]
    assert {name for name, value in whole.items() if short[name] != value} == {"prompts"}
    each = json.loads(ask(*words, "--per-prompt"))
    assert each["prompts"] == whole["prompts"]
    assert [len(block["prompts"]) for block in each["blocks"]] == [6, 6]


def test_who_left_what_undone(into: Into, tmp_path: Path) -> None:
    out = tmp_path / "out"
    into(out, Ranks(1, 5))
    folder = Folder.read(out)
    index = folder.index()
    said = folder.missing(index, 5)
    for rank in (0, 2, 3):
        count = len(range(rank, 15, 5))
        assert f"rank {rank} of 5's shard ends after 0 of its {count} prompts" in said
    assert said.endswith(f", and 1 more; missing {15 - index.found} prompts: run the same command again")
    with pytest.raises(InputError) as caught:
        merged(out)
    assert str(caught.value) == said
    into(out, Ranks(0, 1))
    rest = out / "shard-0-of-1.jsonl"
    rest.write_bytes(b"".join(rest.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="; missing 1 prompt: run the same command again"):
        merged(out)
    with shard(out / "shard-2-of-5.jsonl", Ranks(2, 5)):
        assert ", still at work; rank 3 of 5's shard" in folder.missing(index, 5)

"""`duat prune-bound --out`: by one process or several, interrupted or whole, always the report of a plain run."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from duat_cli.analysis.plan import run as plan_module
from duat_cli.analysis.prune.work import Work
from duat_cli.analysis.shards import run as module
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.prune import PruneRecord

COUNT = 3
CHEAP = ["--measure", "2", "--device", "cpu"]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    file = tmp_path / "held.txt"
    file.write_text("\n".join(f"{'abcdefgh'[k % 8]}{'abcd'[k % 4]}." for k in range(6)))
    return file


@pytest.fixture
def three(few: Path, tmp_path: Path) -> Path:
    file = tmp_path / "three.txt"
    file.write_text("\n".join(few.read_text().splitlines()[:COUNT]))
    return file


@pytest.fixture
def said(two_layers: Path, three: Path, ask: Any) -> Any:
    """Of prune-bound on the two layers."""

    def say(*words: str, prompts: Path = three, **how: Any) -> str:
        probes = [] if "--probes" in words else ["--probes", "2"]
        return ask("prune-bound", str(two_layers), "--prompts", str(prompts), *CHEAP, *probes, *words, **how)

    return say


TRIED = ["--budget", "1", "--exceed", "0.5", "--confidence", "0.9", "--holdout"]
OPTIONS = {
    "every kind": [],
    "held-out prompts and other criteria": ["--granularity", "neuron,head", *TRIED, "HELD", "--criteria"],
    "the hidden states and means": ["--metric", "hidden", "--ablate", "mean", "--granularity", "neuron"],
    "the loss, in rounds, and a repair": [
        "--metric", "nll", "--granularity", "neuron", "--rounds", "2", "--remove", "20%", "--repair",
    ],
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_several_processes_give_the_plain_report(
    said: Any, ask: Any, tmp_path: Path, held_out: Path, options: list[str]
) -> None:
    options = [str(held_out) if word == "HELD" else word for word in options]
    plain, out = said(*options), str(tmp_path / "out")
    assert said(*options, "--out", out, rank=1) == ""
    assert said(*options, "--out", out, rank=0) == plain
    assert ask("merge", out) == plain
    report = json.loads(plain)
    assert len(report["prompts"]) == COUNT
    assert [plan["repair"] is not None for plan in report["plans"]] == ["--repair" in options] * len(report["plans"])
    assert sum(term["measured"] is not None for term in report["terms"]) >= 2


def test_prompts_that_are_token_ids(said: Any, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"input_ids": [70, 71, 72]}\n{"text": "#5 #6"}\n{"input_ids": [5, 6]}\n')
    plain = said("--granularity", "head", prompts=file)
    assert said("--granularity", "head", "--out", str(tmp_path / "out"), prompts=file) == plain


def test_what_is_torn_is_computed_again_and_the_sets_with_it(said: Any, ask: Any, few: Path, taken_up: Any) -> None:
    options, said = ["--granularity", "head"], functools.partial(said, prompts=few)
    plain, out = taken_up(said, *options)
    (out / "sets.json").unlink()
    assert "the sets are not chosen yet: run the same command again" in ask("merge", str(out), code=2)
    assert said(*options, "--out", str(out)) == plain


def test_weights_that_are_read_block_by_block(said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--granularity", "neuron,head"]
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 4)
    monkeypatch.setattr(plan_module, "way_of", lambda made: made.ways[1])
    plain, out = said(*options), str(tmp_path / "out")
    for rank in (1, 0):
        shared = said(*options, "--out", out, rank=rank)
    assert shared == plain
    assert Folder.read(tmp_path / "out").manifest.in_parts


def test_another_budget_asks_only_for_other_sets(
    said: Any, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out, alone = ["--granularity", "neuron"], str(tmp_path / "out"), tmp_path / "alone.json"
    said(*options, "--budget", "0.001", "--out", out)
    plain = said(*options, "--budget", "0.5", "--export", str(alone))
    with monkeypatch.context() as patch:
        patch.setattr(Work, "parts", lambda *_: pytest.fail("a prompt was run again"))
        assert said(*options, "--budget", "0.5", "--out", out) == plain
        patch.setattr(Work, "choose", lambda *_: pytest.fail("sets were chosen again"))
        export = tmp_path / "set.json"
        assert said(*options, "--budget", "0.5", "--out", out, "--export", str(export)) == plain
    assert ask("merge", out) == plain
    assert export.read_text() == alone.read_text()


def test_other_criteria_ask_for_the_sets_alone(
    said: Any, tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out = ["--granularity", "neuron", *TRIED, str(held_out)], str(tmp_path / "out")
    said(*options, "--out", out)
    plain = said(*options, "--criteria")
    assert json.loads(plain)["plans"][0]["criteria"]
    monkeypatch.setattr(Work, "parts", lambda *_: pytest.fail("a prompt was run again"))
    assert said(*options, "--criteria", "--out", out) == plain


def test_another_pooling_asks_only_for_other_sets(
    ask: Any, two_layers: Path, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = tmp_path / "embedder"
    shutil.copytree(two_layers, embedder)
    transformers.AutoModel.from_pretrained(two_layers).save_pretrained(embedder)  # without its head
    words = ["prune-bound", str(embedder), "--prompts", str(three), *CHEAP, "--granularity", "neuron"]
    words += ["--budget", "0.5", "--probes", "2"]
    kept = ["--out", str(tmp_path / "out")]
    before = ask(*words, *kept)
    (embedder / "1_Pooling").mkdir()
    (embedder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    plain = ask(*words)
    monkeypatch.setattr(Work, "parts", lambda *_: pytest.fail("a prompt was run again"))
    assert ask(*words, *kept) == plain
    poolings = [{one["pooling"] for one in json.loads(report)["pooled"]} for report in (before, plain)]
    assert poolings[1] == {"last token"} != poolings[0]


def test_other_options_are_refused(said: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    plain = said("--granularity", "head", "--out", out)
    assert said("--granularity", "head", "--metric", "kl", "--out", out) == plain  # the same, by its name
    for more, what in (
        (["--granularity", "head", "--metric", "hidden"], "--metric, kl there, hidden here"),
        (["--granularity", "neuron"], "--granularity"),
        (["--granularity", "head", "--probes", "5"], "--probes, 2 there, 5 here"),
        (["--granularity", "head", "--ablate", "mean"], "--ablate, zero there, mean here"),
    ):
        assert f"holds results of another {what}" in said(*more, "--out", out, code=2)


def test_a_record_gives_back_what_was_put_into_it(said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []
    of = PruneRecord.of.__func__  # type: ignore[attr-defined]

    def both(cls: Any, prompt: Any, part: Any, work: Any) -> PruneRecord:
        record = of(cls, prompt, part, work)
        seen.append((part, PruneRecord.model_validate_json(record.model_dump_json()).part(work)))
        return record

    monkeypatch.setattr(PruneRecord, "of", classmethod(both))
    said("--out", str(tmp_path / "out"))
    assert len(seen) == COUNT
    for part, back in seen:
        assert part.responded.responses.equal(back.responded.responses)
        assert part.responded.slope.equal(back.responded.slope)
        assert part.responded.loss == back.responded.loss
        assert all(getattr(part, name) == getattr(back, name) for name in ("readings", "error", "effects"))
        assert part.seen.squares.keys() == back.seen.squares.keys()
        assert all(part.seen.squares[key].equal(back.seen.squares[key]) for key in part.seen.squares)

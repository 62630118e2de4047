"""`duat compare` with nothing faked, on the first blocks of the demo: the report, the tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.results.compare.report import CompareReport

TWO = ("--prompt", "The old keeper saw a light.", "--prompt", "The young keeper saw no light.")


@pytest.fixture(autouse=True)
def _beside_the_demo(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and warnings of this process stay as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    monkeypatch.chdir(short)


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "demo") -> CompareReport:
    assert run(["compare", model, *arguments, "--json", "-q"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return CompareReport.model_validate(document)


def test_two_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, *TWO)
    assert [prompt.label for prompt in report.prompts] == ["--prompt 1", "--prompt 2"]
    assert "keeper saw" in " ".join(run.text for run in report.pairs[0].runs)
    block = report.comparison.blocks[1]
    assert block.operator.relative
    assert block.operator.unaligned
    assert block.bias
    assert block.amplification
    assert report.pairs[0].kl


def test_place_by_place(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--align", "position", "--prompt", "The cat sat on the mat.", "--prompt", "The cat sat on the hat.")
    [one] = report_of(capsys, *pair).pairs
    assert [(run.text.strip(), run.text_b and run.text_b.strip()) for run in one.runs][1:] == [
        ("m", "h"),
        ("at.", None),
    ]
    assert run(["compare", "demo", *pair, "-q"]) == 0
    assert "a 8 beside b 8: ' m' and ' h'" in capsys.readouterr().out
    assert run(["compare", "demo", "--align", "position", "--shared", "a", "--prefix", "b"]) == 2
    assert "--align: of --shared" in capsys.readouterr().err


def test_what_moves_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--prompt", "items in the list", "--prompt", "items in the file")
    found = report_of(capsys, *pair, "--patch", "tokens", "--layers", "1").patched
    assert found is not None
    [block] = found.blocks
    assert [token.text for token in block.tokens[-2:]] == [" the", " list"]
    assert block.tokens[-1].effect == pytest.approx(1.0, abs=1e-3)  # the one that differs, and is read from
    assert run(["compare", "demo", *pair, "--patch", "blocks", "-q"]) == 0
    assert "a's own parts give back a's logits" in capsys.readouterr().out


def test_pairs_of_several_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads move each pair's prediction; tokens stand in one place only where all texts have as many."""
    pairs = [
        {"a": "items in the list", "b": "items in the file", "right": ".", "wrong": " is"},
        {"a": "the list", "b": "the file", "right": " is", "wrong": " and"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    followed = ["--target-field", "right", "--against-field", "wrong"]
    found = report_of(capsys, "--prompts", str(file), "--patch", "heads", *followed).patched
    assert found is not None
    assert [(pair.token_b, pair.token_a) for pair in found.pairs] == [(".", " is"), (" is", " and")]
    assert run(["compare", "demo", "--prompts", str(file), "--patch", "tokens", "-q"]) == 2
    assert "--patch tokens: prompts of 3, 5 tokens; one is given what is another's" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--align", "position"), ("--patch", "tokens")])
def test_without_prompts_the_paper_s_two_are_cut_where_tokens_need_partners(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", "demo", *option, "--layers", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "using the paper's own two, cut to as many tokens" in err
    report = CompareReport.model_validate_json(out)
    assert {prompt.tokens for prompt in report.prompts} == {report.pairs[0].aligned} == {17}


def test_a_shared_text_alone_and_behind_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--shared", "The keeper saw a light.")
    alone = report_of(capsys, *shared, "--prefix", "It was night.")
    assert [prompt.label for prompt in alone.prompts] == ["--shared alone", "--prefix 1"]
    [run] = alone.pairs[0].runs
    assert run.text.strip().endswith("keeper saw a light.")
    several = report_of(
        capsys, *shared, "--prefix", "It was night.", "--prefix", "Nothing.", "--prefix", "", "--per-prompt"
    )
    assert [(pair.a, pair.b) for pair in several.pairs] == [(0, 1), (0, 2)]
    assert all(pair.blocks for pair in several.pairs)


def test_demonstrations(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--shared", "Q: Where does it live? A:", "--answer", "in the sea")
    report = report_of(capsys, *shared, "--prefix", "Q: A bee? A: in the hive", "--prefix", "Q: A fish? A: in the sea")
    assert report.context is not None
    labels = [run.label for run in report.context.runs]
    assert labels == ["--shared alone", "--prefix 1", "--prefix 2", "every --prefix"]
    losses = [run.loss or 0.0 for run in report.context.runs]
    assert losses[2] < losses[0]  # the second holds the answer
    for read in report.context.runs[3].reads:
        assert read.tokens > 3
        assert read.share
    assert run(["compare", "demo", *shared, "--prefix", "Q: A bee? A: in the hive"]) == 0
    out = capsys.readouterr().out
    assert "how much of W' on the question reads each demonstration" in out
    assert max(map(len, out.split("\n"))) <= 80


def test_what_dynamic_parameters_buy(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "--fixed", "--max-tokens", "8", model=str(demo_path()))
    assert report.comparison is None
    assert report.fixed is not None
    assert report.fixed.holds
    assert [prompt.tokens for prompt in report.prompts] == [8] * 15
    changes = {(run.held, run.source): run.change for run in report.fixed.runs}
    assert changes["H", "another prompt"] > changes["H", "mean"] > 0.01
    assert changes["H and norms", "another prompt"] > changes["H", "another prompt"]


def test_a_file_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"a": "One light.", "b": "Two lights."}\n{"a": "A boat.", "b": "A boat."}\n', encoding="utf-8")
    report = report_of(capsys, "--prompts", str(file))
    assert report.comparison.pairs == 2
    assert report.pairs[1].kl == 0.0
    assert report.prompts[3].label.endswith("pairs.jsonl line 2, b")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["compare", "demo"]) == 0
    out, err = capsys.readouterr()
    assert "using the paper's own two" in err
    assert max(map(len, out.split("\n"))) <= width
    for word in ("Nui zi created", "H_h: attention weights", "exact: largest relative error"):
        assert word in out


def test_memory_reads_block_by_block_with_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duat_cli.analysis.plan.terms.LIBRARIES", 0)
    whole = report_of(capsys, *TWO, "--no-cache")
    planned = whole.run.planned_memory_bytes
    assert planned is not None
    parts = report_of(capsys, *TWO, "--no-cache", "--memory", str(planned - 1))
    assert parts.run.planned_memory_bytes is not None
    assert parts.run.planned_memory_bytes < planned
    assert parts.comparison == whole.comparison
    assert parts.pairs == whole.pairs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a"), "one prompt has nothing to be compared with"),
        (("--prompt", "aaa", "--prompt", "zzz", "--shared", "S"), "--prompt and --shared"),
        (("--prefix", "P"), "--prefix: stands beside --shared"),
        (("--shared", "S"), "--shared: give a --prefix"),
        (("--shared", "S", "--prefix", "P", "--max-tokens", "3"), "--max-tokens: would cut the --shared text"),
        (("--shared", "S", "--prefix", "P", "--answer", "x", "--answer", "y"), "--answer: given 2 times"),
        (("--shared", "S", "--prefix", "P", "--answer", ""), "--answer: empty"),
        (("--prompts", "pairs.txt"), "JSON lines"),
        (("--fixed", "--prompt", "a boat", "--prompt", "no"), "must be of equal length: give others, or use"),
        (("--fixed", *TWO, "--patch", "blocks"), "--fixed: takes --prompt or --prompts"),
        (("--fixed", *TWO, "--target", "a"), "--fixed: takes --prompt or --prompts"),
        ((*TWO, "--target", "a", "--against", "b"), "give --patch, or leave it out"),
        (
            ("--prompt", "a boat", "--prompt", "no", "--patch", "heads"),
            "--patch: --prompt 1 has 5 tokens and --prompt 2 2",
        ),
        (("--shared", "S", "--prefix", "P", "--patch", "tokens"), "--patch: what is b's stands in its place"),
        (("--fixed", "--prompt", "a boat"), "--fixed: one prompt has no other"),
        (("--fixed", "--shared", "S", "--prefix", "P"), "--fixed: takes --prompt or --prompts"),
        (("--prompt", "boat", "--prompt", "xyz"), "no token of one is in the other but special ones"),
        ((*TWO, "--layers", "99"), "--layers: no block 99"),
        ((*TWO, "--memory", "much"), "--memory 'much'"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "demo", "-q", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err

"""Every command that takes prompts on a checkpoint without a tokenizer: token ids give the numbers of their texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_checkpoints
import pytest

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.tokenizer import load_tokenizer

TEXTS = ["The cat sat.", "A dog ran!"]
COMMANDS = {
    "inspect": "inspect {model} --prompts {prompts} --heads --per-prompt",
    "verify": "verify {model} --prompts {prompts}",
    "attribute": "attribute {model} --prompts {prompts} --target #97",
    "prune-bound": "prune-bound {model} --prompts {prompts} --granularity neuron --effort quick",
    "compare": "compare {model} --prompts {pairs}",
    "compare --fixed": "compare {model} --prompts {prompts} --fixed --max-tokens 10",
    "lora-diff": "lora-diff {model} {model}/adapter --prompts {prompts}",
    "lora-diff --out": "lora-diff {model} {model}/adapter --prompts {prompts} --out {model}/{stem}-out",
    "matrix": "matrix {model} --prompts {one}",
    "matrix --network": "matrix {model} --prompts {one} --network --max-tokens 4",
    "plan": "plan {model} --prompts {prompts} --memory 8GB",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with a tokenizer and one without, and both forms of the prompts."""
    made = tmp_path_factory.mktemp("ids")
    for name in ("named", "bare"):
        bad_checkpoints.llama(made / name, tok=name == "named")
        bad_checkpoints.lora(made / name)
    ids = [load_tokenizer(made / "named")(text)["input_ids"] for text in TEXTS]
    _write(made / "text.jsonl", [{"text": text} for text in TEXTS])
    _write(made / "ids.jsonl", [{"input_ids": one} for one in ids])
    _write(made / "text-one.jsonl", [{"text": TEXTS[0]}])
    _write(made / "ids-one.jsonl", [{"input_ids": ids[0]}])
    _write(made / "text-pairs.jsonl", [{"a": TEXTS[0], "b": TEXTS[1]}])
    _write(made / "ids-pairs.jsonl", [{"a": ids[0], "b": ids[1]}])
    return made


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _numbers(value: Any) -> Iterator[float]:
    """All of a report, in order, but those of its run."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from () if name == "run" else _numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_token_ids_give_what_their_texts_give(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after
    reports = []
    for model, stem in (("named", "text"), ("named", "ids"), ("bare", "ids")):
        places = {name: folder / f"{stem}-{name}.jsonl" for name in ("one", "pairs")}
        places["prompts"] = folder / f"{stem}.jsonl"
        words = command.format(model=folder / model, stem=stem, **places).split()
        assert run([*words, "--json", "-q"]) == 0, capsys.readouterr().err
        reports.append(list(_numbers(json.loads(capsys.readouterr().out))))
    assert len(reports[0]) > 10
    assert reports[1] == reports[0]
    assert reports[2] == reports[0]


def test_where_a_text_stands_the_tokenizer_is_missed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(folder / "mixed.jsonl", [{"input_ids": [5, 6]}, {"text": "The cat"}])
    for words in (["--prompts", str(folder / "mixed.jsonl")], ["--prompt", "The cat"], []):
        assert run(["verify", str(folder / "bare"), "-q", *words]) == 2
        assert "bare: no tokenizer to read texts with, expected tokenizer.json; or give" in capsys.readouterr().err
    assert run(["verify", str(folder / "named"), "-q", "--prompts", str(folder / "mixed.jsonl")]) == 0


def test_a_check_says_which_rule_lacks_the_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(folder / "bare"), "-q", "--json", "--prompts", str(folder / "ids.jsonl")]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    [told] = [one for one in outcomes if one["rule"] == "integrity.tokenizer"]
    assert (told["status"], told["message"]) == ("skipped", "the checkpoint has no tokenizer")


def test_a_template_writes_out_no_token_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder / "named"), "-q", "--chat", "--prompts", str(folder / "ids.jsonl")]) == 2
    assert "ids.jsonl line 1: token ids; a chat template writes out texts" in capsys.readouterr().err

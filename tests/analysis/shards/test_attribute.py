"""`duat attribute --out`: by one process or several, interrupted or whole, always the report of a plain run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from duat_cli.analysis.attribute.run import Attributor
from duat_cli.analysis.shards.folder import Folder
from duat_cli.cli.main import run
from duat_cli.errors import InputError

COUNT = 6


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn, file = random.Random(1), tmp_path_factory.mktemp("prompts") / "few.jsonl"
    texts = ["".join(drawn.choice("abcdefgh ") for _ in range(drawn.randint(3, 6))) + "." for _ in range(COUNT)]
    texts[4] = texts[1]
    lines = [json.dumps({"text": text, "answer": text[0]}) for text in texts]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def said(two_layers: Path, few: Path, ask: Any) -> Any:
    """Of attribute on the two layers."""

    def say(*words: str, prompts: Path = few, **how: Any) -> str:
        fixed = ["attribute", str(two_layers), "--prompts", str(prompts), "--device", "cpu"]
        return ask(*fixed, *([] if "--top" in words else ["--top", "4"]), *words, **how)

    return say


OPTIONS = {
    "one target each": ["--target-field", "answer", "--first-token"],
    "every position": ["--position", "all"],
    "a continuation": ["--continuation", "ab"],
    "measured": ["--measure", "2", "--against", "mean"],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_several_processes_give_the_plain_report(said: Any, ask: Any, tmp_path: Path, options: list[str]) -> None:
    plain, out = said(*options), str(tmp_path / "out")
    assert said(*options, "--out", out, rank=1) == ""
    assert said(*options, "--out", out, rank=0) == plain
    assert ask("merge", out) == plain
    report = json.loads(plain)
    assert report["summary"]["predictions"] == len(report["attribution"]) >= COUNT
    assert [one["prompt"] for one in report["attribution"]] == sorted(one["prompt"] for one in report["attribution"])


def test_what_is_torn_is_computed_again_by_any_number_of_processes(said: Any, taken_up: Any) -> None:
    taken_up(said, "--steps", "2")


def test_every_prompt_is_run_once(said: Any, run_once: Any) -> None:
    run_once(Attributor, said, "--target", "a", "--first-token")


def test_other_options_are_refused(said: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said("--target", "b", "--out", out)
    for options, what in (
        (["--target", "a"], "--target, b there, a here"),
        (["--target", "b", "--position", "0"], "--position, not given there, 0 here"),
        (["--target", "b", "--top", "3"], "--top, 4 there, 3 here"),
    ):
        assert f"holds results of another {what}" in said(*options, "--out", out, code=2)


def test_other_targets_in_the_same_field_are_refused(said: Any, tmp_path: Path) -> None:
    out, options, file = str(tmp_path / "out"), ["--target-field", "answer", "--first-token"], tmp_path / "two.jsonl"
    lines = [{"text": text, "answer": "b"} for text in ("abc.", "de.")]
    file.write_text("\n".join(map(json.dumps, lines)))
    said(*options, "--out", out, prompts=file)
    lines = [line | {"less": "#7"} for line in lines]
    file.write_text("\n".join(map(json.dumps, lines)))
    less = said(*options, "--against-field", "less", "--out", out, prompts=file, code=2)
    assert "holds results of another --against-field, not given there, less (" in less
    lines[1]["answer"] = "a"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert "holds results of another --target-field, answer (" in said(*options, "--out", out, prompts=file, code=2)


def test_a_folder_of_another_command_is_refused(said: Any, two_layers: Path, few: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said("--out", out)
    words = ["inspect", str(two_layers), "--prompts", str(few), "--null", "uniform", "-q", "--out", out]
    assert run([*words, "--device", "cpu"]) == 2
    with pytest.raises(InputError, match="another command, attribute there, inspect here"):
        _open_as_inspect(Path(out))


def _open_as_inspect(out: Path) -> None:
    folder = Folder.read(out)
    Folder.open(out, folder.manifest.model_copy(update={"command": "inspect"}), folder.keys, folder.leaders)


def test_one_prompt_alone_keeps_no_sums(said: Any, tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("abc.")
    plain = said("--target", "a", prompts=file)
    assert said("--target", "a", "--out", str(tmp_path / "out"), prompts=file) == plain
    [shard] = (tmp_path / "out").glob("shard-*")
    assert json.loads(shard.read_text())["record"]["sums"] == []

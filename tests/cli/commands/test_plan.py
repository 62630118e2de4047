"""`duat plan` with nothing faked, and the plan that other commands make before they read weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model import load

MODEL = str(demo_path())


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["plan", MODEL, "--json", "-q", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("prompts", "libraries"), [(["--tokens", "8"], {"torch", "transformers"}), (["--prompt", "def f(x):"], {"torch"})]
)
def test_the_large_libraries_are_not_imported(prompts: list[str], libraries: set[str]) -> None:
    code = (
        "import sys\nfrom duat_cli.cli.main import run\n"
        f"assert run(['plan', {MODEL!r}, '-q', *{prompts}]) == 0\n"
        f"assert not {libraries} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE, check=True)


def test_tokens_stand_for_texts(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--tokens", "2x32,512", "--max-tokens", "100")
    assert report["prompt_tokens"] == [32, 32, 100]
    assert report["chosen"] == "resident"
    assert report["ways"][0]["peak_memory_bytes"] < planned(capsys, "--tokens", "4096")["ways"][0]["peak_memory_bytes"]


@pytest.mark.parametrize("text", ["", "x", "0", "3x0", "2x", "32,", "10000000x1"])
def test_a_list_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--tokens", text]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_texts_and_their_lengths_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--tokens", "3", "--prompt", "a"]) == 2
    assert "--tokens stands in place of texts" in capsys.readouterr().err


def test_what_cannot_run_is_exit_2_with_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--tokens", "32", "--memory", "100MiB", code=2)
    assert report["chosen"] is None
    assert "model.layers.0" in report["reason"]
    assert report["limit_bytes"] == 100 << 20


@pytest.mark.parametrize("command", ["inspect", "verify", "matrix"])
def test_the_command_runs_as_planned(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["--prompt", "def f(x):", "--max-tokens", "9"]
    extra = ["--null", "uniform", "--no-cache"] if command == "inspect" else []
    question = ["--for", command, *texts, *extra[:2]]
    ways = {way["weights"]: way["peak_memory_bytes"] for way in planned(capsys, *question)["ways"]}
    for weights, limit in (("resident", ways["resident"]), ("streamed", ways["resident"] - 1)):
        memory = ["--memory", str(limit)]
        assert planned(capsys, *question, *memory)["chosen"] == weights
        assert run([command, MODEL, "--json", "-q", "--device", "cpu", *texts, *memory, *extra]) == 0
        assert json.loads(capsys.readouterr().out)["run"]["planned_memory_bytes"] == ways[weights]


@pytest.mark.parametrize("command", ["inspect", "verify", "matrix"])
def test_too_little_for_one_block_is_said_before_weights_are_read(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_files", lambda *_, **__: pytest.fail("read"))
    assert run([command, MODEL, "-q", "--prompt", "def f(x):", "--memory", "100MiB"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    for word in ("streamed, it needs", "model.layers.0, takes", "has 100 MiB"):
        assert word in line


def test_a_model_without_a_tokenizer_is_still_refused_by_its_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((demo_path() / name).read_bytes())
    assert run(["verify", str(tmp_path), "-q", "--prompt", "a"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert run(["plan", str(tmp_path), "-q", "--tokens", "8"]) == 0

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
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path
from duat_cli.loading.model import load
from duat_cli.zoo.tiny import tiny_model

MODEL = str(demo_path())


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0, model: str = MODEL) -> dict[str, Any]:
    assert run(["plan", model, "--json", "-q", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_large_libraries_are_not_imported() -> None:
    """Numbers of tokens need neither, texts only the tokenizer's library."""
    code = f"""
import sys
from duat_cli.cli.main import run
for words, left_out in (["--tokens", "8"], ["torch", "transformers"]), (["--prompt", "def f(x):"], ["torch"]):
    assert run(["plan", {MODEL!r}, "-q", *words]) == 0
    assert not set(left_out) & set(sys.modules), words
"""
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE, check=True)


def test_tokens_stand_for_texts(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--tokens", "2x32,512", "--max-tokens", "100")
    assert report["prompt_tokens"] == [32, 32, 100]
    assert report["chosen"] == "resident"
    assert report["ways"][0]["peak_memory_bytes"] < planned(capsys, "--tokens", "4096")["ways"][0]["peak_memory_bytes"]


def test_a_gpu_need_not_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--tokens", "32", "--device", "cuda", "--memory", "2GB")
    assert (report["device"], report["limit_bytes"], report["chosen"]) == ("cuda", 2_000_000_000, "resident")
    assert report["ways"][0]["peak_memory_bytes"] < planned(capsys, "--tokens", "32")["ways"][0]["peak_memory_bytes"]
    assert planned(capsys, "--tokens", "32", "--device", "cuda:1", "--memory", "1MB", code=2)["chosen"] is None
    assert planned(capsys, "--tokens", "8", "--device", "auto", "--time")["device"] in ("cpu", "cuda:0")
    weights = planned(capsys, "--for", "lora-diff", "--device", "cuda", "--memory", "1GB")
    assert weights["device"] == "cpu"  # tensors alone are looked at
    assert run(["plan", MODEL, "--tokens", "32", "--device", "cuda:x", "--memory", "2GB"]) == 2
    assert "--device 'cuda:x': expected auto, cpu, cuda" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "0", "3x0", "2x", "32,", "10000000x1", "10000000"])
def test_a_list_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--tokens", text]) == 2
    assert f"--tokens '{text}': " in (error := capsys.readouterr().err)
    assert "is no number of tokens from 1 to 9999999" in error


@pytest.mark.parametrize("words", [["--prompt", "a"], ["--for", "lora-diff", "--default-prompts"], ["--chat"]])
def test_texts_and_their_lengths_contradict_each_other(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--tokens", "3", *words]) == 2
    error = capsys.readouterr().err
    assert "--tokens stands in place of texts" in error
    assert next(word for word in reversed(words) if word.startswith("--")) in error


def test_what_cannot_run_is_exit_2_with_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--tokens", "32", "--memory", "100MiB", code=2)
    assert report["chosen"] is None
    assert "model.layers.0" in report["reason"]
    assert report["limit_bytes"] == 100 << 20


PRUNE = ["--granularity", "neuron,head", "--probes", "3", "--measure", "2"]
OPTIONS: dict[str, tuple[list[str], list[str]]] = {  # what the command is given, and of it what its plan is
    "inspect": (["--null", "uniform", "--terms", "--no-cache"], ["--null", "uniform", "--terms"]),
    "verify": ([], []),
    "matrix": ([], []),
    "prune-bound": (PRUNE, PRUNE),
    "lora-diff": (["adapter", "--no-cache"], ["--tuned", "adapter"]),
    "check": (["--select", "exactness.*"], ["--select", "exactness.*"]),
    "attribute": (["--position", "all"], ["--position", "all"]),
    "compare": (["--prompt", "def g(y):", "--no-cache"], ["--prompt", "def g(y):"]),
}


@pytest.mark.parametrize("command", OPTIONS)
def test_the_command_runs_as_planned(
    command: str, three: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(three)
    texts = ["--prompt", "def f(x):", "--max-tokens", "9"]
    extra, asked = OPTIONS[command]
    question = ["--for", command, *texts, *asked]
    found = planned(capsys, *question, model="demo")
    ways = {way["weights"]: way["peak_memory_bytes"] for way in found["ways"]}
    for weights, limit in (("resident", ways["resident"]), ("streamed", ways["resident"] - 1)):
        memory = ["--memory", str(limit)]
        assert planned(capsys, *question, *memory, model="demo")["chosen"] == weights
        assert run([command, "demo", *extra, "--json", "-q", "--device", "cpu", *texts, *memory]) == 0
        assert json.loads(capsys.readouterr().out)["run"]["planned_memory_bytes"] == ways[weights]


@pytest.mark.parametrize(
    "command", ["inspect", "verify", "matrix", "prune-bound", "check", "lora-diff", "attribute", "compare"]
)
def test_too_little_for_one_block_is_said_before_weights_are_read(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_files", lambda *_, **__: pytest.fail("read"))
    tuned = [str(demo_adapter_path())] if command == "lora-diff" else []
    more = ["--prompt", "def g(y):"] if command == "compare" else []
    assert run([command, MODEL, *tuned, "-q", "--prompt", "def f(x):", *more, "--memory", "100MiB"]) == 2
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
    assert run(["plan", str(tmp_path), "-q"]) == 2
    assert "no tokenizer to count the tokens of texts with; give --tokens N" in capsys.readouterr().err
    assert run(["plan", str(tmp_path), "-q", "--tokens", "8"]) == 0


def test_a_model_of_sound_with_a_tokenizer_is_asked_for_its_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("whisper").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((demo_path() / "tokenizer.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text('{"feature_extractor_type": "WhisperFeatureExtractor"}')
    assert run(["plan", str(tmp_path), "-q"]) == 2
    assert "it reads no texts but images or sound; give --tokens N" in capsys.readouterr().err
    asked = ["--for", "verify", "--tokens", "64"]
    assert "the proof of one block" in str(planned(capsys, *asked, model=str(tmp_path))["ways"])
    assert "the proof of one block" not in str(planned(capsys, *asked)["ways"])


def test_options_that_cost_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*arguments: str) -> int:
        ways = planned(capsys, "--for", "prune-bound", "--tokens", "64", *arguments)["ways"]
        return int(ways[0]["peak_memory_bytes"])

    assert peak("--probes", "4") < peak()
    assert peak("--metric", "hidden") < peak()
    assert peak("--granularity", "head") <= peak()
    with_trial, without = (
        planned(capsys, "--for", "prune-bound", "--effort", "thorough", *texts)["ways"][1]["weight_reads"]
        for texts in ([], ["--tokens", "64"])
    )
    assert with_trial > without  # of fifteen prompts, ablations do not all fit beside each other


def test_a_repair_is_planned_in_memory_alone(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(three / "demo")
    file = tmp_path / "more.txt"
    file.write_text("def f(x):\n" * 8, encoding="utf-8")
    texts = [*PRUNE, "--prompt", "def f(x):", "--max-tokens", "9", "--repair"]
    question, more = ["--for", "prune-bound", *texts], ["--calibration", str(file)]
    [way] = planned(capsys, *question, model=model)["ways"]
    [calibrated] = planned(capsys, *question, *more, model=model)["ways"]
    assert calibrated["peak_memory_bytes"] > way["peak_memory_bytes"]
    assert run(["prune-bound", model, *texts, *more, "--json", "-q", "--device", "cpu"]) == 0
    said = json.loads(capsys.readouterr().out)["run"]["planned_memory_bytes"]
    assert said == calibrated["peak_memory_bytes"]
    too_little = ["--memory", str(way["peak_memory_bytes"] - 1)]
    assert planned(capsys, *question, *too_little, code=2, model=model)["reason"].startswith("resident, it needs")
    assert run(["plan", MODEL, "--for", "prune-bound", *more]) == 2
    assert "give --repair as well" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["matrix", "compare"])
def test_without_prompts_the_command_s_own_are_planned(
    command: str, three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(three / "demo")
    ways = planned(capsys, "--for", command, model=model)["ways"]
    assert run([command, model, "--json", "-q", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["planned_memory_bytes"] == ways[0]["peak_memory_bytes"]
    assert len(planned(capsys, "--for", "compare", "--fixed")["prompt_tokens"]) == 15
    assert run(["plan", MODEL, "--for", "matrix", "--prompt", "a", "--prompt", "b"]) == 2
    assert "one of 2 prompts; a matrix belongs to one" in capsys.readouterr().err


def test_what_a_patch_keeps_is_planned(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, texts = str(three / "demo"), ["--prompt", "a b c", "--prompt", "a b d"]
    question = ["--for", "compare", *texts]
    [plain, patched] = [
        planned(capsys, *question, *more, model=model)["ways"][0]["peak_memory_bytes"]
        for more in ([], ["--patch", "blocks"])
    ]
    assert plain < patched
    assert run(["compare", model, *texts, "--patch", "blocks", "--json", "-q", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["planned_memory_bytes"] == patched


def test_without_prompts_weights_are_compared_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    for tuned in (str(demo_adapter_path()), MODEL):
        report = planned(capsys, "--for", "lora-diff", "--tuned", tuned)
        assert [way["weights"] for way in report["ways"]] == ["streamed"]
        assert report["prompt_tokens"] == []
    report = planned(capsys, "--for", "lora-diff", "--default-prompts")
    assert len(report["ways"]) == 2
    assert len(report["prompt_tokens"]) == 15


def test_a_check_is_planned_by_its_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.toml"
    file.write_text('extends = "default"\n[rules]\n"pruning.heads" = { level = "error" }\n')

    def of(rule: str) -> dict[str, Any]:
        return planned(capsys, "--for", "check", "--tokens", "64", "--policy", str(file), "--select", rule)

    weights, forward, pruning = (of(rule) for rule in ("integrity.nonfinite", "exactness.*", "pruning.heads"))
    assert [len(report["ways"]) for report in (weights, forward, pruning)] == [1, 2, 2]
    peaks = [report["ways"][0]["peak_memory_bytes"] for report in (weights, forward, pruning)]
    assert peaks == sorted(peaks)


def test_time_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert [way["seconds"] for way in planned(capsys, "--tokens", "8")["ways"]] == [None, None]
    assert all(way["seconds"] > 0 for way in planned(capsys, "--tokens", "8", "--time")["ways"])
    assert run(["plan", MODEL, "--tokens", "8", "--time"]) == 0
    assert "times; about " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for", "verify", "--end-to-end"], "--end-to-end: is of --for inspect, not of verify"),
        (["--fixed"], "--fixed: is of --for compare, not of inspect"),
        (["--patch", "heads"], "--patch: is of --for compare, not of inspect"),
        (["--for", "verify", "--steps", "3"], "--steps: is of --for attribute, not of verify"),
        (["--tuned", "nowhere"], "--tuned: is of --for lora-diff, not of inspect"),
        (["--for", "prune-bound", "--null", "uniform"], "--null: is of --for inspect, not of prune-bound"),
        (["--for", "check", "--measure", "0"], "--measure: is of --for prune-bound, not of check"),
        (["--for", "attribute", "--steps", "3", "--position", "all"], "--steps: says by itself what is attributed"),
    ],
    ids=str,
)
def test_an_option_of_another_command_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", MODEL, "--tokens", "8", "-q", *arguments]) == 2
    assert said in capsys.readouterr().err

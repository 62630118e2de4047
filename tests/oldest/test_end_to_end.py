"""Every command once, nothing faked, on little input, on the oldest transformers that pyproject.toml allows: run by
scripts/test_oldest.sh alone, since the commands' own tests run them on the newest. What is checked does not come from
the release at hand: certificates, numbers that another release wrote, exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers import single_model
from paging import ids_of, in_parts, outputs, saved, whole
from quantising import gpt_oss, mxfp4, quantise

from duat_cli.analysis.support import examine
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import load

pytestmark = pytest.mark.skipif("DUAT_OLDEST" not in os.environ, reason="of scripts/test_oldest.sh")
PROMPT = ("--prompt", "def main(argv):")
BASELINE = Path(__file__).parents[1] / "fixtures" / "baseline_0_1_0.json"

Duat = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def duat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Duat:
    """Run duat; the code and the JSON on standard output."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after

    def read(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = run([*arguments, "--json", "-q"])
        return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return read


def test_it_is_the_release_that_was_asked_for() -> None:
    """The environment shares all other packages, and must not share this one."""
    assert transformers.__version__ == os.environ["DUAT_OLDEST"]


@pytest.mark.parametrize("command", [("inspect", "--terms"), ("verify",)])
def test_the_demo_is_exact(command: tuple[str, ...], duat: Duat) -> None:
    code, report = duat(*command, *PROMPT)
    assert code == 0
    assert report["certificate"]["exact"]
    assert report["certificate"]["relative_error"] < 1e-5


def test_the_matrices_give_what_the_model_gives(short: Path, duat: Duat) -> None:
    code, report = duat("matrix", str(short / "demo"), *PROMPT)
    assert code == 0
    assert report["certificate"]["exact"]


def test_the_parts_add_up_to_the_logit(short: Path, duat: Duat) -> None:
    code, report = duat("attribute", str(short / "demo"), *PROMPT, "--measure", "1")
    assert code == 0
    assert report["certificate"]["residual"] < 1e-5


def test_numbers_are_those_of_another_release(duat: Duat) -> None:
    """All the operator's statistics, the terms' and the weights' of the demo, within the tolerances of a drift."""
    code, report = duat("check", str(demo_path()), "--baseline", str(BASELINE))
    assert code == 0
    passed = {outcome["rule"] for outcome in report["outcomes"] if outcome["status"] == "passed"}
    assert {"drift.weights", "drift.operator", "drift.coupling", "drift.terms"} <= passed


def test_weights_read_block_by_block_give_the_same_report(three: Path, duat: Duat) -> None:
    model = str(three / "demo")
    planned = duat("plan", model, "--for", "check", *PROMPT)[1]["ways"]
    needed = {way["weights"]: way["peak_memory_bytes"] for way in planned}
    assert needed["streamed"] < needed["resident"]
    limits = [(), ("--memory", f"{needed['streamed']}B")]
    reports = [duat("check", model, *PROMPT, *limit)[1] for limit in limits]
    assert [report["run"]["planned_memory_bytes"] for report in reports] == [needed["resident"], needed["streamed"]]
    assert reports[1]["certificate"]["exact"]
    assert reports[1]["model"] == reports[0]["model"]
    assert reports[1]["outcomes"] == reports[0]["outcomes"]


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "albert"])
def test_a_model_read_block_by_block_is_the_model(model_type: str, tmp_path: Path) -> None:
    """Also where tensors are fused, tied or shared between blocks."""
    known = whole(saved(model_type, tmp_path))
    with in_parts(tmp_path) as loaded:
        ids = ids_of(known)
        assert torch.equal(outputs(loaded.model, ids), outputs(known.model, ids))
        assert loaded.paged is not None
        assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)


def test_bounds_of_pruning(short: Path, duat: Duat) -> None:
    asked = ("--granularity", "head", "--probes", "2", "--measure", "2")
    code, report = duat("prune-bound", str(short / "demo"), *PROMPT, *asked)
    assert code == 0
    assert report["certificate"]["exact"]


def test_an_adapter_is_compared(short: Path, duat: Duat) -> None:
    code, report = duat("lora-diff", str(short / "demo"), str(short / "adapter"), *PROMPT)
    assert code == 0
    assert report["certificate"]["exact"]
    assert report["tuned_certificate"]["exact"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "mixtral", "bloom"])
def test_a_model_is_understood_whole(model_type: str) -> None:
    """By the attention interface and by interception (bloom); with causal and bidirectional masks."""
    entry = examine(single_model(model_type))
    assert (entry.status, entry.reason) == ("exact", None)
    assert entry.path == ("softmax interception" if model_type == "bloom" else "attention interface")


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_a_checkpoint_is_loaded_as_it_was_saved(model_type: str, tmp_path: Path) -> None:
    """Also where tensors are fused at load: mixtral's experts, one by one in the file."""
    model = single_model(model_type)
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    fused = {name for name, _ in model.named_parameters()} - set(stored) - {"lm_head.weight"}
    assert bool(fused) == (model_type == "mixtral")
    again = load(str(tmp_path)).model
    ids = torch.arange(40, 47)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt_oss"])
def test_a_quantised_checkpoint_is_the_model_of_its_numbers(model_type: str, tmp_path: Path) -> None:
    """Whole and block by block; also where quantised experts are fused at load."""
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    if model_type == "gpt_oss":
        mxfp4(gpt_oss(folder), plain)
    else:
        quantise(saved(model_type, folder), "fp8", plain)
    one, two = whole(folder), whole(plain)
    assert one.files.quantised is not None
    assert fingerprint(one.model) == fingerprint(two.model)
    ids = ids_of(one)
    assert torch.equal(outputs(one.model, ids), outputs(two.model, ids))
    with in_parts(folder) as loaded:
        assert torch.equal(outputs(loaded.model, ids), outputs(one.model, ids))

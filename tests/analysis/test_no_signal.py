"""A model whose hidden states are zero: nothing relative to them is defined, and every command says so in one line."""

from __future__ import annotations

import json
from pathlib import Path

import bad_checkpoints
import pytest
import torch
from helpers import single_model
from transformers import AutoModelForCausalLM

import duat_cli
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.errors import NoSignalError

LINE = "duat: error: every hidden state behind block 0 (layers.0) is zero"


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def zeros(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zeros")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    bad_checkpoints.tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize("command", ["inspect", "verify", "prune-bound", "matrix"])
def test_the_certificate_is_undefined(command: str, zeros: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run([command, zeros, "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(LINE)
    assert "undefined" in err


def test_the_prompt_whose_hidden_states_are_zero_is_named() -> None:
    model = single_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0.0
    with pytest.raises(NoSignalError, match="undefined; the prompt was #7 #7 #7: are the weights zero"):
        duat_cli.verify(model, prompts=[[5, 6, 7], [7, 7, 7]])
    with pytest.raises(NoSignalError, match="the prompt was #7 #7 #7 #7 #7 #7 #7 #7 …: "):
        duat_cli.verify(model, prompts=[[7] * 9])


def test_there_is_nothing_to_attribute(zeros: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["attribute", zeros, "-q", "--prompt", "a"]) == 2
    assert "every hidden state behind its last block is zero" in capsys.readouterr().err


def test_support_refuses_it(zeros: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["support", zeros, "-q", "--json"]) == 2
    [entry] = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["status"], entry["relative_error"]) == ("refused", None)
    assert "is zero" in entry["reason"]


def test_the_gate_fails_by_the_weights_and_passes_nothing_by_the_forward_pass(
    zeros: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["check", zeros, "-q", "--json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    status = {outcome["rule"]: outcome["status"] for outcome in outcomes}
    assert status["integrity.zero_blocks"] == "failed"
    assert status["exactness.certificate"] == "skipped"
    assert run(["check", zeros, "-q", "--select", "exactness.*", "--select", "integrity.files"]) == 2
    assert capsys.readouterr().err.startswith(LINE)

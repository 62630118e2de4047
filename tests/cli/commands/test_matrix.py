"""`duat matrix` with nothing faked, on a tiny checkpoint: the report, the file, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries, progress
from duat_cli.models.arrays import relative_error
from duat_cli.results.matrix import MatrixReport, NetworkReport
from duat_cli.text import PAPER_PROMPT
from duat_cli.zoo import tiny

WORDS = ("<unk>", *dict.fromkeys(PAPER_PROMPT.split()), "\x1b[31m")


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


def save(model_type: str, folder: Path) -> str:
    """A tiny checkpoint with a tokenizer of a few words."""
    tiny.tiny_model(model_type).save_pretrained(folder)
    ids = {word: number for number, word in enumerate(WORDS, tiny.FIRST_ORDINARY_ID)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama", tmp_path_factory.mktemp("llama"))


def read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata()  # noqa: SIM118


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "olmo2"])
def test_the_written_matrix_applied_to_x_is_the_contribution(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = save(model_type, tmp_path / "model"), tmp_path / "m.safetensors"
    assert run(["matrix", model, "--layer", "1", "-o", str(file), "--dense", "--json", "-q"]) == 0
    report = MatrixReport.model_validate(document(capsys))
    assert report.token_texts == PAPER_PROMPT.split()
    tensors, metadata = read(file)
    x, contribution, W_HVO, W_HV, W_O = (
        tensors[f"prompt.0.block.1.{name}"] for name in ("x", "contribution", "W_HVO", "W_HV", "W_O")
    )
    assert relative_error(W_HVO @ x.reshape(-1), contribution.reshape(-1)) < 1e-5
    assert relative_error(W_O @ W_HV, W_HVO) < 1e-5
    assert metadata["fingerprint"] == report.model.fingerprint
    assert metadata["prompt.0.sha256"] == report.prompt.sha256
    assert json.loads(metadata["prompt.0.tokens"]) == PAPER_PROMPT.split()
    assert list(tmp_path.glob("*.part")) == list(tmp_path.glob(".*")) == []


def test_a_larger_case_is_written_as_factors(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duat_cli.analysis.matrix.case.DENSE_SIDE", 1024)
    file = tmp_path / "m.safetensors"
    assert run(["matrix", llama, "--prompt", "Nui zi " * 25, "-o", str(file), "-q"]) == 0
    page = capsys.readouterr().out
    assert "too large to build" in page
    assert "(--max-tokens)" in page
    tensors, metadata = read(file)
    H, s, t, x, contribution = (tensors[f"prompt.0.block.0.{name}"] for name in ("H", "s", "t", "x", "contribution"))
    value = tensors["block.0.V"].repeat_interleave(len(H) // len(tensors["block.0.V"]), 0)
    own = t[:, None] * H * s[:, None] @ x @ value @ tensors["block.0.O"]
    assert relative_error(own.sum(0), contribution) < 1e-5
    assert metadata["format"] == "duat operators 1"
    assert H.shape[1:] == (50, 50)


def test_the_table(llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 600.0)  # no line on the progress, however slow the machine is
    assert run(["matrix", llama, "--prompt", "Nui \x1b[31m zi dynamics", "--tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "N = 3, " in out
    assert "1 '\\x1b[31m'" in out
    assert "FAILS" not in out
    assert max(map(len, out.split("\n"))) <= 80


@pytest.mark.parametrize("width", [80, 120])
def test_the_whole_network(
    width: int, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    file = tmp_path / "n.safetensors"
    assert run(["matrix", llama, "--network", "--tokens", "3", "-o", str(file), "-q"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.split("\n"))) <= width
    for words in ("1 (Eq. 21)", "2 (Eq. 23)", "Eq. 33 from the matrices alone", "sigma(gate) o up", "exact: "):
        assert words in " ".join(page.split())
    tensors, metadata = read(file)
    linear = tensors["W'_{1,1}"] @ tensors["x'_{0}"] + tensors["b'_{1,3}"]
    assert linear.shape == tensors["x'_{1}"].shape
    assert metadata["format"] == "duat network 1"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]

    assert run(["matrix", llama, "--network", "--tokens", "3", "--json", "-q"]) == 0
    found = NetworkReport.model_validate(document(capsys))
    assert found.certificate.relative_error >= found.whole_error
    assert found.layers[-1].output_error < 1e-5


def test_an_equation_that_does_not_hold_is_exit_1(
    llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from duat_cli.analysis.network import run as network

    def spoiled(*args: Any) -> Any:
        layer = own(*args)
        return dataclasses.replace(layer, W1=layer.W1 * 1.01)

    own = network.layer_of
    monkeypatch.setattr(network, "layer_of", spoiled)
    assert run(["matrix", llama, "--network", "--tokens", "2", "-q"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


def test_an_interrupted_network_leaves_no_file(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from duat_cli.analysis.network import run as network

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "layer_of", stopped)
    assert run(["matrix", llama, "--network", "--tokens", "2", "-q", "-o", str(tmp_path / "n.safetensors")]) != 0
    assert list(tmp_path.iterdir()) == []


def test_the_default_prompt_is_the_papers_and_said(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["matrix", llama]) == 0
    out, err = capsys.readouterr()
    assert PAPER_PROMPT in err
    assert "5 'dynamics'" in out


def test_a_failed_check_is_exit_1(
    llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duat_cli.analysis.matrix.checks.tolerance_for", lambda dtype: 1e-12)
    assert run(["matrix", llama, "-q"]) == 1
    assert "FAILS" in capsys.readouterr().out


def test_a_block_without_factors_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = save("jamba", tmp_path / "model"), tmp_path / "m.safetensors"
    capsys.readouterr()  # the progress bar of saving
    assert run(["matrix", model, "-q", "-o", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "its W' reads values that are a UAT term" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layer", "99"), "--layer 99: no such block; the model has blocks 0 to"),
        (("--layer", "-1"), "--layer"),
        (("--prompt", "a", "--prompt", "b"), "--prompt 2: one of 2 prompts; a matrix belongs to one"),
        (("--prompt", " "), "empty prompt"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("-o", "-"), ".safetensors"),
        (("-o", "m.json"), ".safetensors"),
        (("-o", "missing/m.safetensors"), "there is no folder"),
        (("-o", "folder.safetensors"), "is a folder"),
        (("--network", "--layer", "1"), "--layer and --network contradict each other"),
        (("--network", "--stack", "decoder"), "--network: a decoder's cross-attention adds"),
        (("--network", "--dense"), "--dense and --network contradict each other"),
        (("--dense",), "--dense: writes W' to a file; give -o FILE.safetensors as well"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...],
    words: str,
    llama: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(["matrix", llama, "-q", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_help_is_readable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["matrix", "--help"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.split("\n"))) <= 80
    for option in ("--layer", "--network", "--prompt", "--max-tokens", "--output", "--json"):
        assert option in page


def test_a_network_is_refused_with_any_device_map(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with one that keeps every weight in memory, as blocks are read one by one from there."""
    places = tmp_path / "map.json"
    places.write_text('{"": "cpu"}')
    assert run(["matrix", llama, "--network", "-q", "--max-tokens", "3", "--device-map", str(places)]) == 2
    assert "give more --memory, and leave out --device-map" in capsys.readouterr().err

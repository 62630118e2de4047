"""The file of `duat inspect --matrices` and `duat matrix -o`: W' rebuilt from it is the dense W' of the model."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bad_checkpoints
import pytest
import torch
from helpers import WIRINGS, coupling_of, dense_blocks, far, kron_sum, single_model, written_tensors
from torch import Tensor

from duat_cli.analysis import operator_file
from duat_cli.analysis.operator_file import OperatorFile
from duat_cli.analysis.tensor_file import TensorFile
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.zoo import tiny

TYPES = ("gpt2", "bert", "olmo2", "gemma2", "mixtral")  # norms in front, behind, both; biases; grouped heads
TEXT = "ab"


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of a type, whose vocabulary is that of the byte tokenizer."""
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            model = single_model(model_type)
            model.resize_token_embeddings(264)
            tiny.randomise(model, 5)
            model.save_pretrained(made[model_type])
            bad_checkpoints.tokenizer(made[model_type])
        return made[model_type]

    return of


Written = tuple[dict[str, Tensor], dict[str, str]]


@pytest.fixture(scope="module")
def inspected(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """What inspect writes of a type and two prompts: made once, and only read."""

    @functools.cache
    def of(model_type: str) -> Written:
        file = tmp_path_factory.mktemp("inspected") / "m.safetensors"
        command = ["inspect", str(folder(model_type)), "--matrices", str(file), "--dtype", "float64", "--no-cache"]
        assert run([*command, "-q", "--prompt", TEXT, "--prompt", "xyz"]) == 0
        return written_tensors(file)

    return of


def rebuilt(tensors: dict[str, Tensor], prompt: int, block: int) -> Tensor:
    """W' as the file's own rule says, with torch.kron."""
    here = f"prompt.{prompt}.block.{block}."
    H, s, t = (tensors[here + name] for name in "Hst")
    value, output = (tensors[f"block.{block}.{name}"] for name in "VO")
    maps = value.repeat_interleave(len(H) // len(value), 0) @ output
    return kron_sum(t[:, None] * H * s[:, None], maps)


@functools.cache
def dense(folder: Path, model_type: str, ids: tuple[int, ...]) -> list[Any]:
    """W' of every block by automatic differentiation of the model's own attention, in float64."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto = AutoModelForMaskedLM if model_type == "bert" else AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return dense_blocks(model, torch.tensor([ids]), WIRINGS[model_type])


@pytest.mark.parametrize("model_type", TYPES)
def test_inspect_writes_what_w_is_rebuilt_from(
    model_type: str, folder: Any, inspected: Callable[[str], Written]
) -> None:
    tensors, metadata = inspected(model_type)
    for prompt in range(2):
        ids = tensors[f"prompt.{prompt}.input_ids"]
        for block, expected in enumerate(dense(folder(model_type), model_type, tuple(ids.tolist()))):
            W = rebuilt(tensors, prompt, block)
            assert W.dtype == torch.float64
            assert far(W, expected.W) < 1e-6
            assert far(tensors[f"prompt.{prompt}.block.{block}.C"], coupling_of(expected.W, len(ids))) < 1e-6
            assert far(tensors[f"prompt.{prompt}.block.{block}.x"], expected.x) < 1e-6
    assert json.loads(metadata["missing"]) == {}


@pytest.mark.parametrize("model_type", TYPES)
def test_matrix_writes_the_same_and_what_attention_adds(
    model_type: str, folder: Any, inspected: Callable[[str], Written], tmp_path: Path
) -> None:
    file, model = tmp_path / "m.safetensors", folder(model_type)
    command = ["matrix", str(model), "--layer", "1", "--dtype", "float64", "-q", "--prompt", TEXT, "-o", str(file)]
    assert run([*command, "--dense"]) == 0
    tensors, metadata = written_tensors(file)
    ids = tensors["prompt.0.input_ids"].tolist()
    expected = dense(model, model_type, tuple(ids))[1]
    assert far(rebuilt(tensors, 0, 1), expected.W) < 1e-6
    here = "prompt.0.block.1."
    assert far(tensors[here + "W_HVO"], expected.W) < 1e-6
    assert far(tensors[here + "W_O"] @ tensors[here + "W_HV"], expected.W) < 1e-6
    assert far(tensors[here + "contribution"].reshape(-1), expected.W @ expected.x.reshape(-1)) < 1e-6
    assert far(tensors[here + "C"], coupling_of(expected.W, len(expected.x))) < 1e-6
    tokenizer = load_tokenizer(model)
    assert json.loads(metadata["prompt.0.tokens"]) == [tokenizer.decode([i]) for i in ids]

    others, other_metadata = (
        {k: v for k, v in each.items() if not k.startswith("prompt.1.")} for each in inspected(model_type)
    )
    more = {here + name for name in ("contribution", "W_HVO", "W_HV", "W_O")}
    here_too = {name for name in others if not re.search(r"block\.[02]\.", name)}
    assert set(tensors) - more == here_too
    for name in here_too:
        assert far(tensors[name], others[name]) < 1e-9, name
    assert set(metadata) == set(other_metadata)


def test_every_name_is_in_the_schema(folder: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    assert run(["matrix", str(folder("llama")), "-q", "--prompt", TEXT, "-o", str(file), "--dense"]) == 0
    schema = re.sub(r"\s+", " ", operator_file.__doc__ or "")
    for name in written_tensors(file)[0]:
        assert (
            re.sub(r"\.0(?=\.|$)", "", re.sub(r"W_.*", "W_HVO", name))
            .replace("prompt", "prompt.p")
            .replace("block", "block.b")
            in schema
        ), name


def test_long_attention_is_written_in_the_rows_that_the_run_holds(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from duat_cli.models.instrument import attention

    files = [tmp_path / "whole.safetensors", tmp_path / "rows.safetensors"]
    command = ["inspect", str(folder("llama")), "--no-cache", "-q", "--prompt", "a longer text", "--matrices"]
    assert run([*command, str(files[0])]) == 0
    monkeypatch.setattr(attention, "ROW_BUDGET", 512)
    assert run([*command, str(files[1])]) == 0
    whole, rows = (written_tensors(file)[0] for file in files)
    assert set(whole) == set(rows)
    for name, tensor in whole.items():
        assert far(rows[name], tensor) < 1e-5, name


def test_a_block_without_factors_says_why(folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.safetensors"
    assert run(["inspect", str(folder("jamba")), "-q", "--prompt", TEXT, "--matrices", str(file)]) == 0
    tensors, metadata = written_tensors(file)
    assert json.loads(metadata["missing"])["0"].startswith("its W' reads values")
    assert not any(name.startswith(("block.0.", "prompt.0.block.0.")) for name in tensors)
    assert "prompt.0.block.1.H" in tensors


def test_a_disk_without_room_is_said_before_the_run(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    capsys.readouterr()
    file = tmp_path / "m.safetensors"
    assert run(["inspect", str(folder("llama")), "-q", "--matrices", str(file)]) == 2
    err = capsys.readouterr().err
    assert re.search(r"--matrices '.*': the file would take [\d.]+ GiB, .* has 0.0 GiB left; .*--max-tokens", err)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_leaves_no_file(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("half way")

    monkeypatch.setattr(OperatorFile, "block", broken)
    assert run(["inspect", str(folder("llama")), "-q", "--matrices", str(tmp_path / "m.safetensors")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_matrix_says_that_its_file_may_be_a_page(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["matrix", str(folder("llama")), "-q", "-o", "m.npz"]) == 2
    assert "ends in .safetensors, or in .html for a page" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["m.npz", "m", "-"])
def test_the_name_says_what_the_file_is(name: str, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["inspect", str(folder("llama")), "-q", "--matrices", name]) == 2
    assert "ends in .safetensors" in capsys.readouterr().err


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    """Ids first, then floats of any shape, an empty one among them, out of order within one tensor."""
    path = tmp_path / "t.safetensors"
    file = TensorFile(path, ["ids", "a.b", "empty", "rows"], {"text": "ä\u2028"}, 0, torch.float64)
    ids, a, rows = torch.arange(5), torch.randn(3, 4).double().T, torch.randn(2, 6, 6, dtype=torch.float64)
    file.add("ids", ids)
    file.add("a.b", a)
    file.add("empty", torch.zeros(0, 3))  # written in the file's dtype
    parts = [slice(first, first + 2) for first in (4, 0, 2)]
    file.add_rows("rows", SimpleNamespace(heads=2, tokens=6, chunks=lambda: ((part, rows[:, part]) for part in parts)))
    file.finish()
    tensors, metadata = written_tensors(path)
    assert metadata == {"text": "ä\u2028"}
    for name, tensor in {"ids": ids, "a.b": a, "empty": torch.zeros(0, 3).double(), "rows": rows}.items():
        assert torch.equal(tensors[name], tensor)

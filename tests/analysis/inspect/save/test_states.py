"""What `duat inspect --save` writes, read back: H, norms rebuilt and biases as hooks on the model see them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import paging
import pytest
import torch
from helpers import WIRINGS, Detached, as_loaded, far, prompt_of, quiet, token_ids, two_single, written_tensors
from paging import in_parts, whole
from torch import Tensor, nn

import duat_cli as duat
from duat_cli.analysis.inspect.options import Filled, InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.save import states as subject
from duat_cli.analysis.inspect.save.asked import kinds_of
from duat_cli.analysis.inspect.save.states import StateFiles, saving
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.cli.terminal.signals import Stopped
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.instrument.hooks import hooked

FIRST = {"llama": "mlp.gate_proj", "gpt2": "mlp.c_fc", "gemma2": "mlp.gate_proj", "bert": "intermediate.dense"}
FFN = {"llama": "mlp", "gpt2": "mlp", "gemma2": "mlp", "bert": "intermediate"}
ALL = frozenset(("H", "S", "bias"))


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


def saved(model: Any, folder: Path, *ids: Tensor, kinds: frozenset[str] = ALL, **options: Any) -> None:
    with saving(folder, kinds, str) as files:
        given = InspectOptions(cache=False, **options)
        inspect(as_loaded(model), [prompt_of(one) for one in ids], given, quiet, Filled(states=files))


def linear_paths(model: Any, model_type: str, ids: Tensor) -> list[Tensor]:
    """What of each FFN's first layer follows x_0 linearly: J x_0, with FFNs, softmax and norm scales constant."""
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    firsts = [block.get_submodule(FIRST[model_type]) for block in blocks]
    ffns = [block.get_submodule(FFN[model_type]) for block in blocks]
    found: dict[int, Tensor] = {}
    x0: list[Tensor] = []

    def leaf(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x0.append(args[0].detach().clone().requires_grad_())
        return (x0[0] * 1.0, *args[1:]), kwargs

    def constant(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output.detach()

    def catch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found[firsts.index(module)] = output

    with (
        Detached(), torch.enable_grad(), hooked(blocks[:1], leaf), hooked(firsts, after=catch),
        hooked(ffns, after=constant),
    ):  # fmt: skip
        model(input_ids=ids)
    paths = []
    for index in range(len(blocks)):
        out = found[index]
        seeds = torch.eye(out.numel()).reshape(-1, *out.shape)
        (rows,) = torch.autograd.grad(out, x0[0], seeds, is_grads_batched=True, retain_graph=True)
        paths.append((rows.reshape(out.numel(), -1) @ x0[0].reshape(-1)).reshape(out.shape[1:]).detach())
    return paths


def seen_of(
    model: Any, blocks: list[nn.Module], first: str, ids: Tensor
) -> tuple[Any, dict[tuple[int, str], tuple[Tensor, Tensor]], dict[int, Tensor]]:
    """Attention weights; what every norm reads and gives; what the first layer of every FFN gives."""
    norms: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    firsts: dict[int, Tensor] = {}
    named = {module: (index, name) for index, block in enumerate(blocks) for name, module in block.named_modules()}

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        index, name = named[module]
        if name == first:
            firsts[index] = output[0]
        else:
            norms[index, name] = args[0][0], output[0]

    watched = [module for module, (_, name) in named.items() if "norm" in name.lower() or "ln_" in name]
    watched += [block.get_submodule(first) for block in blocks]
    with torch.no_grad(), hooked(watched, after=keep):
        return model(input_ids=ids, output_attentions=True).attentions, norms, firsts


@pytest.mark.parametrize("model_type", FIRST)
def test_everything_is_what_hooks_on_the_model_see(model_type: str, tmp_path: Path) -> None:
    model = two_single(model_type)
    ids = token_ids(model, 5), token_ids(model, 3, 2)
    saved(model, tmp_path / "states", *ids)
    model.set_attn_implementation("eager")
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    for number, one in enumerate(ids):
        tensors, metadata = written_tensors(tmp_path / "states" / f"prompt-{number}.safetensors")
        attentions, norms, firsts = seen_of(model, blocks, FIRST[model_type], one)
        for index, expected in enumerate(attentions):
            assert far(tensors[f"block.{index}.H"], expected[0]) < 1e-5
        assert len(norms) >= 2 * len(blocks)
        for (index, name), (x, y) in norms.items():
            S, gain = tensors[f"block.{index}.S.{name}"], tensors[f"block.{index}.gain.{name}"]
            bias = getattr(blocks[index].get_submodule(name), "bias", None)
            centred = x if bias is None else x - x.mean(-1, keepdim=True)
            assert far(S[:, None] * centred * gain, y if bias is None else y - bias) < 1e-5
        for index, path in enumerate(linear_paths(model, model_type, one)):
            assert far(tensors[f"block.{index}.b2"] + path, firsts[index]) < 1e-5
            assert (index == 0 and model_type != "gpt2") or far(path, firsts[index]) > 0.01  # it is no rounding error
            assert tensors[f"block.{index}.b3"].shape == (one.shape[1], model.config.hidden_size)
        assert torch.equal(tensors["input_ids"], one[0])
        said = json.loads(metadata["first"])
        assert said["0"] in (FIRST[model_type], "the nonlinearity reads the FFN's input itself")
        assert json.loads(metadata["tokens"]) == [str(token) for token in one[0].tolist()]


def test_the_static_part_is_what_the_frozen_network_makes_of_zero(tmp_path: Path) -> None:
    """gpt2, whose FFNs are constants: b'_{j,3} is x_j less J x_0 less every UAT term, which J of each FFN carries."""
    model = two_single("gpt2")
    ids = token_ids(model, 4)
    saved(model, tmp_path / "states", ids)
    tensors, _ = written_tensors(tmp_path / "states" / "prompt-0.safetensors")
    blocks, outs = list(model.transformer.h), list[Tensor]()
    leaves: list[Tensor] = []

    def leaf(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves.append(args[0].detach().clone().requires_grad_())
        return (leaves[-1] * 1.0, *args[1:]), kwargs

    def neurons(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves.append(args[0].detach().clone().requires_grad_())
        return (leaves[-1] * 1.0,), kwargs

    def catch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outs.append(output if isinstance(output, Tensor) else output[0])

    with (
        Detached(), torch.enable_grad(), hooked(blocks[:1], leaf), hooked([b.mlp.c_proj for b in blocks], neurons),
        hooked(blocks, after=catch),
    ):  # fmt: skip
        model(input_ids=ids)
    for index, out in enumerate(outs):
        seeds = torch.eye(out.numel()).reshape(-1, *out.shape)
        rows = torch.autograd.grad(
            out, leaves[: index + 2], seeds, is_grads_batched=True, retain_graph=True
        )  # x_0 and the neurons of every FFN up to here
        moving = sum(r.reshape(out.numel(), -1) @ x.reshape(-1) for r, x in zip(rows, leaves, strict=False))
        assert far(tensors[f"block.{index}.b3"].reshape(-1), out.detach().reshape(-1) - moving.detach()) < 1e-4


def test_only_what_was_asked_for_is_there(tmp_path: Path) -> None:
    model = two_single("llama")
    saved(model, tmp_path / "states", token_ids(model, 4), kinds=frozenset("S"), layers=frozenset({1}))
    tensors, metadata = written_tensors(tmp_path / "states" / "prompt-0.safetensors")
    assert {name.split(".")[2] for name in tensors if name != "input_ids"} == {"S", "gain"}
    assert {name.split(".")[1] for name in tensors if name != "input_ids"} == {"1"}
    assert metadata["kinds"] == "S"


def test_an_ffn_without_a_first_layer_says_why(tmp_path: Path) -> None:
    model = two_single("mixtral")
    saved(model, tmp_path / "states", token_ids(model, 4))
    tensors, metadata = written_tensors(tmp_path / "states" / "prompt-0.safetensors")
    assert "block.0.b2" not in tensors
    assert "no single linear layer" in json.loads(metadata["missing"])["0"]
    assert not tensors["block.0.b3"].any()  # no biases anywhere


@pytest.mark.parametrize("model_type", ["gpt2", "jamba", "albert"])
def test_weights_read_block_by_block_give_the_same_files(model_type: str, tmp_path: Path) -> None:
    known = whole(paging.two_saved(model_type, tmp_path / "model"))
    prompts = [prompt_of(token_ids(known.model, tokens)) for tokens in (4, 3)]

    def write(loaded: LoadedModel, folder: Path) -> None:
        with saving(folder, ALL, str) as files:
            inspect(loaded, prompts, InspectOptions(cache=False), quiet, Filled(states=files))

    write(known, tmp_path / "whole")
    with in_parts(tmp_path / "model") as loaded:
        write(loaded, tmp_path / "parts")
    for number in range(2):
        one, other = (written_tensors(tmp_path / name / f"prompt-{number}.safetensors") for name in ("whole", "parts"))
        assert one[0].keys() == other[0].keys()
        assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        assert one[1] == other[1]


def test_a_run_that_fails_or_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    ids = token_ids(model, 4), token_ids(model, 3)
    own, calls = StateFiles.block, list[int]()

    def stopped(self: StateFiles, number: int, *rest: Any) -> None:
        own(self, number, *rest)
        calls.append(number)
        if len(calls) == 3:  # in the second prompt, the first is written
            raise Stopped("interrupted", 130)

    monkeypatch.setattr(StateFiles, "block", stopped)
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    for folder in (tmp_path / "states", there):
        calls.clear()
        with pytest.raises(Stopped):
            saved(model, folder, *ids)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert [path.name for path in there.iterdir()] == ["mine.txt"]
    monkeypatch.undo()

    real, moves = subject.os.replace, list[Path]()

    def full(source: Path, target: Path) -> None:
        if moves:
            raise OSError(28, "No space left on device")
        moves.append(target)
        real(source, target)

    monkeypatch.setattr(subject.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        saved(model, there, *ids)
    assert [path.name for path in there.iterdir()] == ["mine.txt"]


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "prompt-0.safetensors").write_text("")
    cases = {
        ("--save", "H"): "--save and --save-to go together",
        ("--save-to", str(tmp_path / "x")): "--save and --save-to go together",
        ("--save", "H,K", "--save-to", str(tmp_path / "x")): "--save 'H,K': expected some of H, S and bias",
        ("--save", "H", "--save-to", str(tmp_path / "file")): "file: a file; expected a folder",
        ("--save", "H", "--save-to", str(tmp_path / "no" / "x")): "create it first",
        ("--save", "H", "--save-to", str(tmp_path / "full")): "holds prompts of another run",
        ("--save", "H", "--save-to", str(tmp_path / "x"), "--out", str(tmp_path / "y")): "contradict each other",
    }
    for arguments, words in cases.items():
        assert run(["inspect", "-q", "--prompt", "a", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert kinds_of("bias, H") == {"H", "bias"}
    model = two_single("llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(InputError, match=r"the files take at least 0.0 GiB, .* has 0.0 GiB left"):
        saved(model, tmp_path / "x", token_ids(model, 4))


def test_the_command_and_python_write_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, options = "The cat sat on the mat.", ["--null", "uniform", "--layers", "0,2", "--no-cache"]
    files = [str(tmp_path / name) for name in ("command", "python")]
    command = ["inspect", str(demo_path()), "--prompt", text, "--save", "H,S,bias", "--save-to", files[0], *options]
    assert run(command) == 0
    assert f"wrote 1 file to {files[0]}" in capsys.readouterr().err
    report = duat.inspect(
        demo_path(), prompts=[text], save=["H", "S", "bias"], save_to=files[1], null="uniform", layers=[0, 2],
        routing=True, cache=False,
    )  # fmt: skip
    first, second = (written_tensors(Path(folder) / "prompt-0.safetensors") for folder in files)
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1]
    routing = report.blocks[0].routing
    assert routing is not None
    assert routing.rebuilt_error is not None

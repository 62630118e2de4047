"""A model whose own forward pass fails is refused in one line that names it and points to config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
import transformers as t
from helpers import prompt_of, single_model
from paging import two_saved

from duat_cli.analysis.own_fault import own_fault
from duat_cli.analysis.session import Session
from duat_cli.cli.main import run
from duat_cli.errors import CheckpointError, ForwardError, UnsupportedModelError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import resolve
from duat_cli.loading.inputs.drawn import default_inputs
from duat_cli.loading.model.load import load_files
from duat_cli.models.discovery.chains import ByNameError
from duat_cli.zoo import tiny


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    bad.build("good_moe_per_expert", tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("paged", [False, True])
def test_more_experts_a_token_than_there_are(paged: bool, experts: Path) -> None:
    bad.jedit(experts / bad.CFG, num_experts_per_tok=9)
    loaded = load_files(resolve(str(experts)), inspect_folder(experts), paged=paged)
    with pytest.raises(ForwardError) as fault:
        _ = Session(loaded, lambda *_: None).structure
    assert str(experts) in str(fault.value)
    assert "forward pass fails: RuntimeError: selected index k out of range" in str(fault.value)
    assert "config.json" in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("model_type", "fault"), [("xglm", "without overflow"), ("xlnet", "Float but found Double")])
def test_a_dtype_that_its_code_cannot_compute_in_is_named(
    model_type: str, fault: str, paged: bool, tmp_path: Path
) -> None:
    """XGLM's mask is filled with the smallest number of its dtype, by way of float32; parameters of XLNet stay in
    float32 whatever dtype is asked for."""
    tiny.tiny_model(model_type).save_pretrained(tmp_path)
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), dtype="float64", paged=paged)
    with pytest.raises(ForwardError, match=rf"{fault}; if it runs in float32, its code cannot in float64; "):
        _ = Session(loaded, lambda *_: None).structure
    sound = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    assert Session(sound, lambda *_: None).structure.blocks


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("clip", "duat inspect and verify read its parts by --stack vision, text or all"),
        # its vision part is no model of its own
        ("groupvit", "duat inspect and verify read a part of it by --stack text"),
    ],
)
def test_a_model_of_two_towers_names_its_parts(model_type: str, way: str, paged: bool, tmp_path: Path) -> None:
    tiny.tiny_model(model_type).save_pretrained(tmp_path)
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    with pytest.raises(ForwardError, match=rf"cannot run on one kind of input .*; {way}$"):
        _ = Session(loaded, lambda *_: None).structure


@pytest.mark.parametrize("paged", [False, True])
def test_weights_that_are_no_numbers_are_all_that_is_blamed(paged: bool, tmp_path: Path) -> None:
    """A norm that reads NaN is none by what it gives, and is not to blame."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = t.ViTModel(t.ViTConfig(**sizes))
    name, weight = next((n, p) for n, p in model.named_parameters() if "layers.1" in n and "v_proj" in n)
    weight.data.view(-1)[3] = float("nan")
    model.save_pretrained(tmp_path)
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    like = default_inputs("pixel_values", loaded.model.config, tmp_path, False)
    said = f"{name} holds 1 values that are NaN or infinite, so nothing that it computes can be looked at"
    with pytest.raises(CheckpointError, match=said):
        _ = Session(replace(loaded, like=like), lambda *_: None).structure


@pytest.mark.parametrize("paged", [False, True])
def test_a_stream_that_changes_between_blocks_is_read_by_name(paged: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    model = t.YolosModel(t.YolosConfig(**sizes, image_size=[32, 32], patch_size=8, num_detection_tokens=3))
    tiny.randomise(model, 1)  # places that are added between blocks, which begin as zeros, among the rest
    model.save_pretrained(tmp_path)
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    like = default_inputs("pixel_values", loaded.model.config, tmp_path, False)
    with pytest.raises(ByNameError, match=r"between its blocks; duat .* --stack encoder\.layer$"):
        _ = Session(replace(loaded, like=like), lambda *_: None).structure


@pytest.mark.parametrize("paged", [False, True])
def test_a_prompt_that_the_model_cannot_read_is_told_from_those_that_it_can(paged: bool, tmp_path: Path) -> None:
    single_model("gpt2").save_pretrained(tmp_path)  # it has 512 positions
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    prompts = [prompt_of(torch.full((1, tokens), 7)) for tokens in (5, 600)]
    with pytest.raises(ForwardError, match=r"fails on a prompt of 600 tokens: IndexError: .* --max-tokens cuts"):
        Session(loaded, lambda *_: None).sweep_all(prompts, lambda _number: lambda _run: None)


@pytest.mark.parametrize("paged", [False, True])
def test_a_model_that_draws_random_numbers(paged: bool, tmp_path: Path) -> None:
    """It is not duat that moves it; with what it draws given, it is exact."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    t.ViTMAEModel(t.ViTMAEConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loaded = load_files(resolve(str(tmp_path)), inspect_folder(tmp_path), paged=paged)
    with pytest.raises(UnsupportedModelError, match="draws random numbers: two passes over one input differ"):
        _ = Session(replace(loaded, like={"pixel_values": pixels}), lambda *_: None).structure
    given = {"pixel_values": pixels, "noise": torch.arange(16.0)[None]}
    assert Session(replace(loaded, like=given), lambda *_: None).structure.plain_error == 0


@pytest.mark.parametrize("paged", [False, True])
def test_a_model_that_runs_has_no_fault(paged: bool, experts: Path) -> None:
    loaded = load_files(resolve(str(experts)), inspect_folder(experts), paged=paged)
    assert own_fault(loaded) is None
    assert own_fault(loaded, [torch.tensor([[1, 2, 3]])]) is None
    found = own_fault(loaded, [torch.tensor([[10**6]])])
    assert found is not None
    assert "IndexError" in str(found)


@pytest.mark.parametrize("way", [[], ["--device-map", "auto"]], ids=["in memory", "block by block"])
def test_a_model_that_cannot_be_read_is_refused_with_what_reads_its_weights(
    way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(two_saved("jetmoe", tmp_path / "model"))
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [3, 5, 7]}\n')
    assert run(["inspect", folder, "--prompts", str(tmp_path / "ids.jsonl"), "-q", *way]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("is not held; duat check --weights-only and duat lora-diff without prompts read its weights")
    assert run(["check", folder, "--weights-only", "-q"]) == 0
    assert run(["lora-diff", folder, folder, "-q"]) == 0

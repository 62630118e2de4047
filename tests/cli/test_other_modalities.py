"""Models of images and sound: what inspect, verify and matrix read of them, and what other commands say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bad_checkpoints
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries

SMALL_WHISPER: dict[str, Any] = {
    "vocab_size": 264, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 64, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 259, "decoder_start_token_id": 256, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip
SMALL_VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SAID = {
    "vit": "ViTForImageClassification (vit) takes `pixel_values` (images), no token ids",
    "whisper": "WhisperForConditionalGeneration (whisper) takes `input_features` (sound), no token ids",
}
READ = "duat inspect, verify, matrix, compare, check, prune-bound and lora-diff (without --out) read such models"


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image model comes without a tokenizer, as published ones do."""
    root = tmp_path_factory.mktemp("models")
    ViTForImageClassification(ViTConfig(**SMALL_VIT)).save_pretrained(root / "vit")
    WhisperForConditionalGeneration(WhisperConfig(**SMALL_WHISPER)).save_pretrained(root / "whisper")
    bad_checkpoints.tokenizer(root / "whisper")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(root / "vit")
    WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=500).save_pretrained(root / "whisper")
    return {name: str(root / name) for name in SAID}


@pytest.mark.parametrize("command", ["compare --fixed", "attribute", "prune-bound --out out"])
@pytest.mark.parametrize("name", SAID)
def test_what_it_takes_and_what_is_read(
    name: str,
    command: str,
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()  # the progress bar of saving
    words = command.split()
    monkeypatch.chdir(tmp_path)
    assert run([words[0], folders[name], *words[1:], "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"duat: error: {SAID[name]}; {READ}")


@pytest.mark.parametrize("name", SAID)
def test_support_runs_it_on_drawn_input(name: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["support", folders[name], "-q", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["entries"]
    assert entry["status"] == "exact"
    assert entry["relative_error"] < 1e-5


@pytest.mark.parametrize(("name", "made"), [("vit", "drawn picture"), ("whisper", "computed tone")])
@pytest.mark.parametrize("command", ["inspect", "verify", "matrix", "compare", "check", "prune-bound"])
def test_without_a_file_something_is_drawn(
    command: str, name: str, made: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run([command, folders[name], "-q", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["certificate"]["relative_error"] < 1e-5
    beside = " and noise of its shape" if command == "compare" else ""
    assert f"no file was given: read was a {made}{beside}" in report["warnings"]


def test_compare_says_of_a_drawn_picture_nothing_of_texts(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["compare", folders["vit"]]) == 0
    out, err = capsys.readouterr()
    assert "read was a drawn picture and noise of its shape" in " ".join(out.split())
    assert "no prompts given" not in err


@pytest.mark.parametrize(("name", "made"), [("vit", "drawn picture"), ("whisper", "computed tone")])
def test_lora_diff_draws_something_where_it_is_asked_for(
    name: str, made: str, folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [folders[name], folders[name]]
    capsys.readouterr()
    assert run(["lora-diff", *both, "--default-prompts", "-q", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert f"no file was given: read was a {made}" in report["warnings"]
    assert [block["terms"]["output"] for block in report["blocks"]] == [0.0, 0.0]
    for words, said in (
        (["--image", "a.png", "--out", str(tmp_path / "out")], "--out and --image contradict each other"),
        (["--default-prompts", "--out", str(tmp_path / "out")], f"{SAID[name]}; {READ}"),
        (["--default-prompts", "--stack", "decoder", "--out", str(tmp_path / "out")], "--out and --stack contradict"),
    ):
        assert run(["lora-diff", *both, *words, "-q"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"duat: error: {said}")


def test_files_are_prompts_one_by_one(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    save_file({"pixel_values": torch.randn(1, 3, 16, 16)}, tmp_path / "b.safetensors")
    names = ["--image", str(tmp_path / "a.png"), "--inputs", str(tmp_path / "b.safetensors")]
    capsys.readouterr()
    assert run(["inspect", folders["vit"], *names, "-q", "--json", "--per-prompt", "--null", "uniform"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [prompt["tokens"] for prompt in report["prompts"]] == [17, 17]
    assert len({prompt["sha256"] for prompt in report["prompts"]}) == 2
    assert report["certificate"]["exact"]
    assert not any("no file" in note for note in report["warnings"])


def test_a_part_of_a_model_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**{k: v for k, v in SMALL_VIT.items() if "size" in k and "image" not in k and "patch" not in k}}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 264, "max_position_embeddings": 20}
    CLIPModel(CLIPConfig(text_config=text, vision_config=SMALL_VIT, projection_dim=8)).save_pretrained(tmp_path)
    bad_checkpoints.tokenizer(tmp_path)
    capsys.readouterr()
    assert run(["verify", str(tmp_path), "--stack", "all", "--prompt", "ab", "-q", "--json"]) == 0
    seen, read = json.loads(capsys.readouterr().out)["stacks"]
    assert run(["verify", str(tmp_path), "--stack", "text", "--prompt", "ab", "-q", "--json"]) == 0
    assert read["blocks"] == json.loads(capsys.readouterr().out)["blocks"]
    assert (len(seen["blocks"]), len(read["blocks"])) == (2, 1)
    assert (seen["prompts"][0]["tokens"], read["prompts"][0]["tokens"]) == (17, 2)
    assert any(note.startswith("--stack vision: the CLIPVision") for note in seen["warnings"])
    assert any(note.startswith("--stack text: the CLIPText") for note in read["warnings"])
    assert run(["verify", str(tmp_path), "--image", "a.png", "-q"]) == 2
    assert capsys.readouterr().err.endswith(
        "--image: CLIPModel reads each kind of input by a part of its own; give --image beside --stack vision, "
        "--prompt beside --stack text, or all beside --stack all\n"
    )
    for words in (["verify", "--prompt", "ab"], ["prune-bound", "--prompt", "ab"], ["attribute", "--prompt", "ab"]):
        assert run([words[0], str(tmp_path), *words[1:], "-q"]) == 2
        assert "; duat inspect and verify read its parts by --stack vision, text or all\n" in capsys.readouterr().err


def test_two_pictures_are_compared(folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", folders["vit"]]
    for name, seed in (("a", 1), ("b", 2)):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        words += ["--image", str(tmp_path / f"{name}.png")]
    capsys.readouterr()
    for more in ([], ["--align", "position"]):
        assert run([*words, *more, "--json", "-q", "--patch", "heads", "--target", "LABEL_1", "--against", "0"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [prompt["label"] for prompt in report["prompts"]] == [f"--image {name}" for name in words[3::2]]
        assert report["pairs"][0]["aligned"] == 17
        assert report["pairs"][0]["kl"] > 0
        assert (report["patched"]["pairs"][0]["token_b"], report["patched"]["holds"]) == ("LABEL_1", True)
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "17 aligned" in out
    assert "paper" not in err
    for more, said in (
        (["--fixed"], "--fixed: takes --prompt or --prompts"),
        (["--max-tokens", "3"], "--max-tokens: pictures, sounds and texts with pictures are read whole"),
        (["--prompt", "ab"], "ViTForImageClassification reads no token ids here"),
        (["--prompt", "ab", "--prompt", "ac"], "--image and --prompt: compare reads texts, or pictures or sounds"),
    ):
        assert run([*words, *more, "-q"]) == 2
        assert said in capsys.readouterr().err
    assert run(["compare", folders["vit"], "--prompt", "ab", "--prompt", "ac", "-q"]) == 2
    assert "ViTForImageClassification reads no token ids here; give --image" in capsys.readouterr().err


WRONG = {
    "a text for a model of images": ("vit", ["--prompt", "hello"], "ViTForImageClassification reads no token ids here"),
    "a sound for a model of images": ("vit", ["--audio", "a.wav"], "ViTForImageClassification reads images, no sound"),
    "a picture for a model of sound": ("whisper", ["--image", "a.png"], "reads sound, no images"),
    "a picture for a model of text": (None, ["--image", "a.png"], "ForCausalLM reads token ids here; give --prompt\n"),
    "no such part": ("vit", ["--stack", "audio"], "--stack audio: ViTForImageClassification has no part"),
    "no such file": ("vit", ["--inputs", "none.safetensors"], "--inputs none.safetensors: no such file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_one_line(case: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name, words, said = WRONG[case]
    capsys.readouterr()
    assert run(["verify", *([] if name is None else [folders[name]]), *words, "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("name", SAID)
def test_the_weights_can_still_be_checked(
    name: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", folders[name], "-q", "--weights-only"]) == 0
    assert "PASSED" in capsys.readouterr().out

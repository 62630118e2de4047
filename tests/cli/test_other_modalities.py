"""Models of images and sound: every command says in one line what they are and what is read today."""

from __future__ import annotations

import json
from typing import Any

import bad_checkpoints
import pytest
from transformers import ViTConfig, ViTForImageClassification, WhisperConfig, WhisperForConditionalGeneration

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
READ = "read today are models that take `input_ids`"


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
    return {name: str(root / name) for name in SAID}


@pytest.mark.parametrize("command", ["inspect", "verify", "prune-bound", "check", "matrix"])
@pytest.mark.parametrize("name", SAID)
def test_what_it_takes_and_what_is_read(
    name: str, command: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()  # the progress bar of saving
    assert run([command, folders[name], "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"duat: error: {SAID[name]}; {READ}")


@pytest.mark.parametrize("name", SAID)
def test_support_refuses_it_with_the_same_words(
    name: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["support", folders[name], "-q", "--json"]) == 2
    [entry] = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["status"], entry["reason"]) == ("refused", f"{SAID[name]}; {READ}")


@pytest.mark.parametrize("name", SAID)
def test_the_weights_can_still_be_checked(
    name: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", folders[name], "-q", "--weights-only"]) == 0
    assert "PASSED" in capsys.readouterr().out

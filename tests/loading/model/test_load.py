"""Loading: the model is the checkpoint's, to the bit, and nothing is read that was not named."""

from __future__ import annotations

import codecs
import json
import os
import shutil
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
import transformers
from helpers import minilm
from refusals import refusal_of_load
from safetensors.torch import load_file

from duat_cli.compat import libc
from duat_cli.errors import CheckpointError, DuatError
from duat_cli.loading.model import load as load_module
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import load, parse_device
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.text import clean

FILES = ("good_", "st_", "idx_", "cfg_", "w_", "pkl_", "tok_")
CASES = [name for name in bad.CASES if name.startswith(FILES)]
NEEDS_PROMPTS = {"tok_ids_out_of_range"}  # test_prompts.py


# --- the sample of bad checkpoints --------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CASES if n not in NEEDS_PROMPTS])
def test_case(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "c"
    case = bad.build(name, folder)
    capfd.readouterr()
    try:
        loaded = load(str(folder / case.inputs["model"]))
        if "prompts" in case.inputs:
            load_tokenizer(loaded.files.path)
        outcome, lines = "ok" if case.kind == "ok" else "warn", list(loaded.warnings)
    except DuatError as error:
        outcome, lines = "error", [str(error)]
    assert outcome == case.kind, lines
    assert lines == [clean(line) for line in lines]
    said = "\n".join(lines).replace(str(tmp_path), "")
    assert case.matches(said) if case.kind != "ok" else not said
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("PWNED"))
    assert not Path("PWNED").exists()


# --- a real checkpoint ---------------------------------------------------------------------------------


def test_a_real_checkpoint_is_loaded_to_the_bit() -> None:
    loaded = load(str(minilm()))
    state = loaded.model.state_dict()
    stored = load_file(minilm() / "model.safetensors")
    assert type(loaded.model).__name__ == "BertModel"
    assert loaded.warnings == ()
    assert loaded.nonfinite_weights == {}
    assert set(state) <= set(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state.items())


def test_a_model_is_ready_to_analyse() -> None:
    loaded = load(str(minilm()))
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert (loaded.name, loaded.revision) == (str(minilm()), None)
    assert (loaded.dtype, loaded.device) == ("float32", "cpu")


def test_the_load_is_the_one_of_transformers(tmp_path: Path) -> None:
    """Fused experts and tied embeddings arrive as in from_pretrained, although we hand over the tensors."""
    for name in ("good_moe_per_expert", "good_tied", "good_sharded", "good_mixed_dtype"):
        folder = tmp_path / name
        bad.build(name, folder)
        model = load(str(folder)).model
        reference = type(model).from_pretrained(folder, dtype=torch.float32)
        assert fingerprint(model) == fingerprint(reference)


# --- dtype and device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp64", "float64"), ("bf16", "bfloat16"), ("float16", "float16"), ("auto", "bfloat16")]
)
def test_dtype(asked: str, dtype: str, tmp_path: Path) -> None:
    bad.build("good_bf16", tmp_path / "m")
    loaded = load(str(tmp_path / "m"), dtype=asked)
    assert loaded.dtype == dtype
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}


def test_auto_dtype_without_one_in_the_config(tmp_path: Path) -> None:
    bad.build("good_bf16", tmp_path / "m")
    bad.jedit(tmp_path / "m" / bad.CFG, drop=("dtype", "torch_dtype"))
    assert load(str(tmp_path / "m"), dtype="auto").dtype == "bfloat16"


def test_an_option_is_refused_before_anything_is_read() -> None:
    assert "--dtype 'int8': expected auto, float64" in refusal_of_load("./nope", dtype="int8")
    assert "--device 'warp': expected auto, cpu" in refusal_of_load("./nope", device="warp")
    assert "--device 'meta': not usable here" in refusal_of_load("./nope", device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
def test_a_device_that_is_not_there() -> None:
    assert "--device 'cuda': not usable here" in refusal_of_load("./nope", device="cuda")
    assert parse_device("auto") == torch.device("cpu")


# --- which class ---------------------------------------------------------------------------------------


def test_a_missing_pooler_is_zero_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(minilm(), folder)
    bad.wedit(folder, lambda s: {k: v for k, v in s.items() if "pooler" not in k})
    first, second = load(str(folder)), load(str(folder))
    assert any("no pooler" in w for w in first.warnings)
    assert fingerprint(first.model) == fingerprint(second.model)
    assert not first.model.pooler.dense.weight.any()


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa", "nonesuch"])
def test_attention_is_eager_whatever_the_config_says(name: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, _attn_implementation=name)
    assert load(str(sound)).model.config._attn_implementation == "eager"


def test_an_adapter_beside_the_weights_is_refused(sound: Path) -> None:
    """transformers would load it, and look for its base model on the hub."""
    for file in bad.lora(sound).iterdir():
        shutil.copy(file, sound / file.name)
    bad.jedit(sound / "adapter_config.json", base_model_name_or_path="org/name")
    assert "an adapter beside the weights" in refusal_of_load(str(sound))


def test_no_descriptor_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    before = descriptors()
    for _ in range(3):
        with pytest.raises(CheckpointError), calling_tokenizer("the tokenizer"):
            raise ValueError
    assert descriptors() == before


def test_a_config_that_begins_with_a_byte_order_mark_says_so(sound: Path) -> None:
    config = sound / "config.json"
    config.write_bytes(codecs.BOM_UTF8 + config.read_bytes())
    with pytest.raises(CheckpointError, match=r"config\.json: begins with a byte order mark \(BOM\); save"):
        load(str(sound))


def test_a_tokenizer_is_only_read_when_asked_for(tmp_path: Path) -> None:
    bad.build("tok_corrupt", tmp_path / "m")
    load(str(tmp_path / "m"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not JSON"):
        load_tokenizer(tmp_path / "m")


def test_a_tokenizer_that_is_json_and_nonsense(sound: Path) -> None:
    (sound / "tokenizer.json").write_text(json.dumps({"model": {"type": "Martian"}}))
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        load_tokenizer(sound)


def test_a_tensor_that_holds_nothing_is_read(tmp_path: Path) -> None:
    """An image model without register tokens saves them as (1, 0, M)."""
    config = transformers.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        num_register_tokens=0,
    )  # fmt: skip
    transformers.DINOv3ViTModel(config).save_pretrained(tmp_path)
    model = load(str(tmp_path)).model
    assert model.embeddings.register_tokens.shape == (1, 0, 32)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.embeddings.cls_token, stored["embeddings.cls_token"])


def test_small_freed_blocks_go_back_while_all_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    filled = load_module.filled

    def read(*args: Any, **more: Any) -> Any:
        asked.append("read")
        return filled(*args, **more)

    monkeypatch.setattr(libc, "_asked", {libc._M_MMAP_THRESHOLD: libc._LARGE})
    monkeypatch.setattr(libc, "_set", lambda wanted: not asked.append([*wanted.values()]))
    monkeypatch.setattr(load_module, "filled", read)
    load_module.load(None)
    assert asked == [[128 << 10], "read", [1 << 20]]

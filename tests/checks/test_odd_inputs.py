"""More inputs of the kinds that the cases have: each is refused with one clean line, or finishes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
from children import forked
from running_checks import Duat
from transformers import dynamic_module_utils

from duat_cli.cli.main import main

POINTER = "\noid sha256:" + "0" * 64 + "\nsize 123\n"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m", shards=True)
    return tmp_path / "m"


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://git-lfs.github.com/spec/v1", "https://hawser.github.com/spec/v1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("file", [bad.W, bad.CFG])
def test_every_form_of_a_pointer(url: str, end: str, file: str, sound: Path, duat: Duat) -> None:
    (sound / file).write_text((f"version {url}" + POINTER).replace("\n", end), newline="")
    duat("check", sound).refused(file, "git-lfs pointer", "123 bytes")


def test_a_pointer_in_the_place_of_one_shard_and_of_the_tokenizer(sharded: Path, duat: Duat) -> None:
    shard = bad.shard_names(sharded)[1]
    kept = (sharded / shard).read_bytes()
    (sharded / shard).write_text("version https://git-lfs.github.com/spec/v1" + POINTER)
    duat("check", sharded).refused(shard, "git-lfs")
    (sharded / shard).write_bytes(kept)
    (sharded / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1" + POINTER)
    duat("check", sharded).refused("tokenizer.json", "git-lfs")
    assert duat("check", sharded, "--weights-only").code == 0


def test_links(sharded: Path, tmp_path: Path, duat: Duat) -> None:
    """Out of the folder only into a store of large files; the folder itself may be a link."""
    shard = sharded / bad.shard_names(sharded)[0]
    for place, refused in (("elsewhere/x.safetensors", True), (f"store/{'ab' * 32}", False), ("blobs/x", False)):
        target = tmp_path / place
        target.parent.mkdir()
        shard.rename(target)
        shard.symlink_to(target)
        if refused:
            duat("check", sharded).refused(shard.name, "outside")
        else:
            assert duat("check", sharded, "--weights-only").code == 0
        shard.unlink()
        target.rename(shard)
    inner = sharded / "inner.safetensors"
    shard.rename(inner)
    shard.symlink_to("inner.safetensors")
    (tmp_path / "link").symlink_to(sharded)
    assert duat("check", tmp_path / "link", "--weights-only").code == 0


@pytest.mark.parametrize("file", [bad.CFG, bad.W, "tokenizer.json", "vocab.json"])
def test_what_is_no_regular_file(file: str, sound: Path, duat: Duat) -> None:
    (sound / file).unlink(missing_ok=True)
    (sound / file).mkdir()
    duat("check", sound).refused(file, "no regular file")
    (sound / file).rmdir()
    os.mkfifo(sound / file)
    duat("check", sound).refused(file, "no regular file")
    (sound / file).unlink()
    (sound / file).symlink_to("/dev/zero")
    duat("check", sound).refused(file)


@pytest.mark.parametrize("name", ["pytorch_model.pt", "model.ckpt", "weights.pkl", "model.pth"])
def test_a_pickle_under_another_name(name: str, sound: Path, duat: Duat) -> None:
    (sound / bad.W).unlink()
    bad.evil_bin(sound / name, sound)
    duat("check", sound).refused(name, "safetensors")
    assert not list(sound.rglob("PWNED"))


@pytest.mark.parametrize("protocol", [None, 0, 2, 4])
def test_a_pickle_that_is_called_safetensors(protocol: int | None, sound: Path, duat: Duat) -> None:
    if protocol is None:
        bad.evil_bin(sound / bad.W, sound)
    else:
        (sound / bad.W).write_bytes(pickle.dumps({"a": bad.Touch(sound)}, protocol=protocol))
    duat("check", sound).refused(bad.W, "safetensors")
    assert not list(sound.rglob("PWNED"))


def test_a_folder_that_may_not_be_read(sound: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may read everything, so the refusal of the system is played."""

    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    duat("check", sound).refused("cannot be read: Permission denied")


def test_names_that_no_file_can_have(sound: Path, duat: Duat, tmp_path: Path) -> None:
    duat("check", "./" + "x" * 5000).refused("no such folder")
    duat("check", tmp_path / ("x" * 300)).refused("no such folder")
    duat("check", "./\0").refused()
    duat("check", "~nobody_at_all/x").refused("no such folder")
    for option in ("--baseline", "--base", "--policy", "--prompts"):
        duat("check", sound, option, "~nobody_at_all/x").refused("~nobody_at_all/x")


def test_a_folder_that_cannot_be_written_is_only_read(sound: Path, duat: Duat) -> None:
    before = {p: p.stat().st_mtime_ns for p in sound.iterdir()}
    assert duat("check", sound).code == 0
    assert {p: p.stat().st_mtime_ns for p in sound.iterdir()} == before


# --- JSON -------------------------------------------------------------------------------------------------


def test_equal_keys_with_different_values(sound: Path, duat: Duat) -> None:
    text = (sound / bad.CFG).read_text()
    (sound / bad.CFG).write_text(text.replace("{", '{"hidden_size": 64, ', 1))
    duat("check", sound).refused(bad.CFG, "'hidden_size' stands twice")
    (sound / bad.CFG).write_text(text.replace("{", '{"hidden_size": 32, ', 1))
    assert duat("check", sound, "--weights-only").code == 0


def test_equal_keys_of_an_index(sharded: Path, duat: Duat) -> None:
    text = (sharded / bad.IDX).read_text()
    (sharded / bad.IDX).write_text(text.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors",'))
    duat("check", sharded).refused(bad.IDX, "stands twice")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": ' * 50_000, "JSON"),
        (b'{"a": "' + b"x" * (17 << 20) + b'"}', "too large"),
        (b'{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps"),
        (b'{"model_type": "llama", "hidden_size": -1}', "hidden_size"),
        (b'{"model_type": "llama", "hidden_size": 1.5}', "hidden_size"),
        (b'{"model_type": "llama", "hidden_size": true}', "hidden_size"),
        (b'{"model_type": "llama", "hidden_size": 1e999}', "hidden_size"),
        (b'{"model_type": "llama", "hidden_size": [32]}', ""),
        (b'{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads: expected a number above 0, got 0"),
        (b'{"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 3}', ""),
        (b'{"model_type": "llama", "vocab_size": 99999999999999999999}', "vocab_size"),
        (b'{"model_type": ""}', "model_type"),
        (b'{"model_type": "../llama"}', "model_type"),
        (b'{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}', "bitsandbytes"),
        (b'{"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}}', "compressed"),
        (b'{"model_type": "llama", "quantization_config": "int8"}', "int8"),
        (b'{"model_type": "llama", "quantization_config": [1]}', "quantization_config"),
    ],
)
def test_a_config(content: bytes, part: str, sound: Path, duat: Duat) -> None:
    (sound / bad.CFG).write_bytes(content)
    duat("check", sound).refused(part)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "..\\x.safetensors", "a/../../x.safetensors", "C:x.safetensors", 7, None]
)
def test_an_index_that_leads_elsewhere(name: object, sharded: Path, duat: Duat) -> None:
    weight_map = json.loads((sharded / bad.IDX).read_text())["weight_map"]
    bad.jedit(sharded / bad.IDX, weight_map=weight_map | {"lm_head.weight": name})
    duat("check", sharded).refused("weight_map")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda h: h.update(__metadata__={"format": 3}), "__metadata__"),
        (lambda h: h.update(__metadata__=[]), "__metadata__"),
        (lambda h: h["model.norm.weight"].update(shape=[32.0]), "shape"),
        (lambda h: h["model.norm.weight"].update(shape=[2**70]), "shape"),
        (lambda h: h["model.norm.weight"].update(dtype="F8_E4M3", shape=[128]), "quantised"),
        (lambda h: h["model.norm.weight"].update(dtype="I32"), ""),
    ],
)
def test_a_header(change: Callable[[dict[str, Any]], None], part: str, sound: Path, duat: Duat) -> None:
    header, data = bad.split(sound / bad.W)
    change(header)
    bad.join(sound / bad.W, header, data)
    duat("check", sound).refused(bad.W, part)


def test_a_header_behind_blanks(sound: Path, duat: Duat) -> None:
    header, data = bad.split(sound / bad.W)
    bad.join(sound / bad.W, b"  " + json.dumps(header).encode(), data)
    duat("check", sound).refused(bad.W, "header")


def test_many_and_empty_tensors(sound: Path, duat: Duat) -> None:
    odd = {"": torch.zeros(2), "empty": torch.zeros(0, 7), "e8": torch.zeros(0).to(torch.float8_e4m3fn)}
    odd |= {f"x{i}": torch.tensor(1.0) for i in range(300)}
    bad.wedit(sound, lambda s: {**s, **odd})
    done = duat("check", sound, "--json")
    assert done.code == 0
    assert "integrity.unexpected" in done.rules("warned")


# --- tokenizers and prompts ---------------------------------------------------------------------------------


def test_code_of_a_tokenizer_is_not_run(sound: Path, duat: Duat) -> None:
    bad.evil_py(sound / "evil.py", sound)
    bad.jedit(
        sound / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.T", "evil.T"]},
        tokenizer_class="EvilTokenizer",
    )
    done = duat("check", sound)
    assert done.code in (0, 2)
    assert not list(sound.rglob("PWNED"))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("p.txt", b"x" * (10 << 20), "too long"),
        ("p.jsonl", b'{"text": "a"}\n{"prompt": "b"}\n', "line 2"),
        ("p.jsonl", b'{"text": 3}\n', '"text"'),
        ("p.jsonl", b'{"text": "a"', "not JSON"),
        ("p.jsonl", b"[" * 100_000, "not JSON"),
        ("p.txt", b"\xff\xfea\x00", "UTF-8"),
        ("p.txt", b"\xef\xbb\xbf\n", "no prompts"),
    ],
)
def test_prompts_that_cannot_be_used(name: str, content: bytes, part: str, sound: Path, duat: Duat) -> None:
    (sound / name).write_bytes(content)
    for command in ("inspect", "check"):
        duat(command, sound, "--prompts", sound / name).refused(part)


def test_prompts_behind_a_byte_order_mark(sound: Path, duat: Duat) -> None:
    (sound / "p.txt").write_bytes(b"\xef\xbb\xbfhello\r\n")
    assert duat("check", sound, "--prompts", sound / "p.txt").code == 0


def test_prompts_from_what_is_no_file(sound: Path, duat: Duat, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    duat("check", sound, "--prompts", tmp_path / "pipe").refused("named pipe")
    duat("check", sound, "--prompts", tmp_path).refused("cannot be read")
    duat("check", sound, "--prompts", "/dev/zero").refused("/dev/zero")
    duat("check", sound, "--prompts", "/dev/null").refused("no prompts")
    duat("check", sound, "--prompts", tmp_path / "nope").refused("cannot be read")


def test_a_file_that_shrinks_while_it_is_read(sound: Path, monkeypatch: pytest.MonkeyPatch, duat: Duat) -> None:
    """A map would kill the process here."""
    from duat_cli.loading.checkpoint import stream

    pieces = stream._pieces

    def cut(path: Path, *rest: Any) -> Any:
        os.truncate(path, 5000)
        return pieces(path, *rest)

    monkeypatch.setattr(stream, "_pieces", cut)
    duat("check", sound, "--weights-only").refused(bad.W, "became shorter")


def test_code_that_leaves_the_process_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit code would pass for duat's."""
    for place, leaving in (("import", "import sys\nsys.exit(0)\n"), ("forward", "import sys\n")):
        bad.llama(tmp_path / place)
        (tmp_path / place / "own.py").write_text(
            f"{leaving}from transformers import LlamaConfig, LlamaForCausalLM\n"
            "class Config(LlamaConfig):\n    model_type = 'own'\n"
            "class Model(LlamaForCausalLM):\n    config_class = Config\n"
            "    def forward(self, *given, **named):\n        sys.exit(0)\n"
        )
        auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
        bad.jedit(tmp_path / place / bad.CFG, model_type="own", architectures=["Model"], auto_map=auto_map)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "c"))
    for place in ("import", "forward"):
        assert forked(main, ["check", f"./{place}", "--trust-remote-code"]) == 2
        [error] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("duat: error: ")]
        assert "SystemExit: 0" in error


def test_code_of_its_own_for_a_known_type_is_named_and_left(sound: Path, duat: Duat) -> None:
    bad.jedit(sound / bad.CFG, auto_map={"AutoModelForCausalLM": "own.Model"})
    report = duat("verify", sound, "--json", "--prompt", "a").json
    assert any("(auto_map), which was not run: read as transformers' LlamaForCausalLM" in w for w in report["warnings"])


def test_custom_code_is_named_and_not_run(sound: Path, duat: Duat) -> None:
    bad.evil_py(sound / "evil.py", sound)
    bad.jedit(sound / bad.CFG, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    duat("check", sound).refused("auto_map", "not run")
    assert not list(sound.rglob("PWNED"))

"""The pre-flight: every faulty file is refused by name, every sound one is read in full."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from refusals import refusal_of_files

from duat_cli.loading.checkpoint.headers import read_header
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, inspect_folder
from duat_cli.text import clean

# what only a load can see: it knows which tensors the architecture wants
AT_LOAD = {"cfg_more_layers_than_weights", "cfg_vocab_mismatch", "w_one_tensor_missing"}
FILES = ("good_", "st_", "idx_", "cfg_", "w_", "pkl_")
CASES = [name for name in bad.CASES if name.startswith(FILES)]
REFUSED = [name for name in CASES if bad.CASES[name].kind == "error" and name not in AT_LOAD]
READ = [name for name in CASES if name not in REFUSED]


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    case = bad.build(name, folder)
    message = refusal_of_files(folder / case.inputs["model"])
    assert case.matches(message.replace(str(tmp_path), "")), message
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("name", READ)
def test_a_sound_file_is_read_in_full(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    case = bad.build(name, tmp_path / "c")
    folder = tmp_path / "c" / case.inputs["model"]
    files = inspect_folder(folder)
    for shard in files.shards:
        with safe_open(str(folder / shard), framework="pt") as reader:
            stored = {n: tuple(reader.get_slice(n).get_shape()) for n in reader.keys()}  # noqa: SIM118
        assert stored == {n: t.shape for n, t in files.tensors.items() if t.shard == shard}
    assert all(w == clean(w) for w in files.warnings)


@pytest.mark.parametrize("name", ["idx_tensor_in_wrong_shard", "idx_total_size_wrong", "st_name_with_escapes"])
def test_an_odd_file_is_read_with_a_warning(name: str, tmp_path: Path) -> None:
    case = bad.build(name, tmp_path / "c")
    warnings = inspect_folder(tmp_path / "c").warnings
    assert len(warnings) == 1
    assert case.matches(warnings[0])


def test_the_files_say_what_is_stored(sound: Path) -> None:
    files: CheckpointFiles = inspect_folder(sound)
    norm = files.tensors["model.norm.weight"]
    assert (norm.shape, norm.dtype, norm.shard, norm.bytes) == ((32,), "F32", bad.W, 128)
    header = int.from_bytes((sound / bad.W).read_bytes()[:8], "little")
    assert files.total_bytes == (sound / bad.W).stat().st_size - 8 - header
    assert files.config["model_type"] == "llama"
    assert files.warnings == ()


# --- faults that the sample does not hold ---------------------------------------------------------------


def test_no_folder_and_a_file_instead_of_one(sound: Path) -> None:
    assert refusal_of_files(sound / "nope").endswith("no such folder")
    assert "is a file; expected the folder" in refusal_of_files(sound / bad.CFG)
    beside = sound.with_name(f"{sound.name}_")
    assert refusal_of_files(beside).endswith(f"no such folder; near it is '{sound}'")


def test_a_folder_that_holds_the_checkpoint_one_level_deeper(sound: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    for name in ("checkpoint-500", "checkpoint-1000"):
        (outer / name).mkdir(parents=True)
    (outer / "checkpoint-500" / bad.CFG).write_bytes((sound / bad.CFG).read_bytes())
    assert refusal_of_files(outer).endswith(f"; found checkpoint-500/config.json: give {outer / 'checkpoint-500'}")
    (outer / "checkpoint-1000" / bad.CFG).write_bytes((sound / bad.CFG).read_bytes())
    said = f"; found checkpoint-500/config.json, and 1 more: give {outer / 'checkpoint-500'}"
    assert refusal_of_files(outer).endswith(said)


def test_gguf_is_named_with_the_way_out(sound: Path) -> None:
    """As a file, in the place of the weights, and alone in its folder."""
    file = sound / "m.gguf"
    file.write_bytes(b"GGUF")
    (sound / bad.W).unlink()
    messages = [refusal_of_files(file), refusal_of_files(sound)]
    (sound / bad.CFG).unlink()
    messages.append(refusal_of_files(sound))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"{file}: GGUF is not read: ")
    assert "from_pretrained(FOLDER, gguf_file=NAME)" in messages[0]


def test_an_adapter_folder_says_what_it_is(tmp_path: Path) -> None:
    assert "holds an adapter" in refusal_of_files(bad.lora(tmp_path))


def test_an_adapter_beside_the_weights_is_refused(sound: Path) -> None:
    """transformers would load it; alone with the base's config it is still an adapter, and no model."""
    shutil.copytree(bad.lora(sound.parent), sound, dirs_exist_ok=True)
    message = refusal_of_files(sound)
    assert "adapter_config.json: an adapter beside the weights, which transformers would load" in message
    assert message.endswith("compare with 'duat lora-diff FOLDER ADAPTER'")
    (sound / "adapter_model.safetensors").unlink()
    assert refusal_of_files(sound) == message
    (sound / bad.W).unlink()
    assert refusal_of_files(sound).endswith("and no weights of a model: give the base model's folder")


def test_a_file_without_tensors(sound: Path) -> None:
    bad.wedit(sound, lambda tensors: tensors.clear())
    assert "model.safetensors: holds no tensors" in refusal_of_files(sound)


def test_eight_bit_floats_without_their_scales(sound: Path) -> None:
    import torch

    bad.wedit(sound, lambda s: {**s, "x": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    assert "1 tensor quantised (F8_E4M3): 'x'" in refusal_of_files(sound)
    (sound / "hf_quant_config.json").write_text("{}")
    assert "quantised (F8_E4M3) by ModelOpt (hf_quant_config.json), which is not read: 'x'" in refusal_of_files(sound)


def test_double_precision_is_no_small_float(sound: Path) -> None:
    bad.wedit(sound, lambda s: {n: t.double() for n, t in s.items()})
    assert {t.dtype for t in inspect_folder(sound).tensors.values()} == {"F64"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"text_config": {"_attn_implementation": "a/b"}}, "text_config._attn_implementation: 'a/b'"),
        ({"_attn_implementation": {"text_config": "a/b:c"}}, "_attn_implementation: 'a/b:c'"),
        ({"text_config": {"dtype": "int3"}}, "text_config.dtype: unknown dtype 'int3'"),
        ({"text_config": {"num_hidden_layers": 10**6}}, "text_config.num_hidden_layers: 1000000 layers"),
        ({"num_local_experts": 10**9}, "num_local_experts: 1000000000 is too large"),
        ({"hidden_size": -32}, "hidden_size: expected a number above 0, got -32"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a number above 0, got 0"),
        ({"text_config": {"num_key_value_heads": 0}}, "text_config.num_key_value_heads: expected a number above"),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"hidden_size": 32.0}, "hidden_size: expected an integer"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quant_method 'awq'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list"),
        ({"model_type": ["llama"]}, "model_type: expected a text"),
        ({"model_type": None}, "model_type: missing"),
    ],
)
def test_a_config_field_that_could_steer_the_loader(fields: dict[str, Any], part: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, **fields)
    message = refusal_of_files(sound)
    assert f"{bad.CFG}: " in message
    assert part in message


def test_a_config_of_timm_names_no_type(sound: Path) -> None:
    config = json.loads((sound / bad.CFG).read_text())
    del config["model_type"]
    (sound / bad.CFG).write_text(json.dumps({**config, "pretrained_cfg": {}}))
    assert inspect_folder(sound).config["model_type"] == "timm_wrapper"


@pytest.mark.parametrize("content", ["", "[" * 100_000, "9" * 5000, "null", '"text"'])
def test_a_config_that_is_no_object(content: str, sound: Path) -> None:
    (sound / bad.CFG).write_text(content)
    assert bad.CFG in refusal_of_files(sound)


def test_a_folder_name_with_escapes_is_shown_escaped(tmp_path: Path) -> None:
    folder = tmp_path / f"m{bad.ESC}\n[bold]"
    bad.llama(folder, tok=False)
    inspect_folder(folder)
    (folder / bad.W).unlink()
    assert "\\x1b" in refusal_of_files(folder)


def test_a_folder_is_found_and_checked_without_torch(sound: Path) -> None:
    code = (
        "import sys\n"
        "from duat_cli.loading.checkpoint.preflight import inspect_folder\n"
        "from duat_cli.loading.checkpoint.source import resolve\n"
        f"print(len(inspect_folder(resolve({str(sound)!r}).path).tensors))\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(len(read_header(sound / bad.W, "w")[0])), "[]"]

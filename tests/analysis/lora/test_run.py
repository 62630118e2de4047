"""The door of `duat lora-diff`: which comparison a folder asks for, and what is opened for it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import bad_checkpoints
import peft
import pytest
import torch
from paging import pager_of, streaming
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora.report import Pair
from duat_cli.analysis.lora.run import LoraRequest, lora_diff, task_of
from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest
from duat_cli.analysis.plan.run import plan
from duat_cli.analysis.plan.shape import shape_of
from duat_cli.analysis.plan.work import weight_reads
from duat_cli.errors import CheckpointError, InputError, UnsupportedModelError
from duat_cli.loading.adapter.source import find_tuned
from duat_cli.loading.checkpoint import source
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path, resolve
from duat_cli.loading.model.load import load_files
from duat_cli.loading.paged import layout
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport

DEMO, ADAPTER = str(demo_path()), str(demo_adapter_path())
BASE = ModelRequest(None, None, None, None, False, "float32", "cpu")
BUNDLED = LoraRequest(BASE, None, None, None, lint=False, no_base=False, large=False, cache=False)


def answer(request: LoraRequest) -> tuple[LoraReport, list[str]]:
    steps: list[str] = []
    run = Run(started="2026-01-01T00:00:00+00:00", seconds=0.0, peak_memory_bytes=None)
    report = lora_diff(request, lambda done, total, what: steps.append(what), lambda _planned=None, **_: run)
    assert report is not None
    return report, list(dict.fromkeys(steps))


@pytest.fixture
def bundled_short(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo and its adapter have fewer blocks."""
    monkeypatch.setattr(source, "demo_path", lambda: short / "demo")
    return short


@pytest.mark.parametrize(
    ("asked", "mode", "level"),
    [
        ({}, "adapter", "weights"),
        ({"tuned": "adapter", "other": "adapter"}, "two adapters", "weights"),
        ({"lint": True}, "adapter", "lint"),
        ({"tuned": "demo"}, "checkpoint", "weights"),
        ({"texts": PromptRequest(["abc"], None, 2)}, "adapter", "prompts"),
        ({"tuned": "demo", "texts": PromptRequest(["abc"], None, 2)}, "checkpoint", "prompts"),
    ],
)
def test_what_is_compared(asked: dict[str, Any], mode: str, level: str, bundled_short: Path) -> None:
    folders = {name: str(bundled_short / asked[name]) for name in ("tuned", "other") if name in asked}
    report, steps = answer(replace(BUNDLED, **{**asked, **folders}))
    assert (report.mode, report.level) == (mode, level)
    assert ("loading torch and transformers" in steps) == (level == "prompts")
    assert steps.index("looking for the demo model") < steps.index("loading torch")


@pytest.mark.usefixtures("bundled_short")
def test_no_base_reads_no_tensor_of_the_base() -> None:
    report, _ = answer(replace(BUNDLED, no_base=True))
    assert all(m.relative_frobenius is None for m in report.modules)
    assert all(m.relative_frobenius is not None for m in answer(BUNDLED)[0].modules)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (replace(BUNDLED, tuned=DEMO, other=ADAPTER), InputError, "two adapters can be compared, but"),
        (replace(BUNDLED, tuned=DEMO, other=DEMO), InputError, f"for two checkpoints: duat lora-diff {DEMO} {DEMO}"),
        (replace(BUNDLED, tuned=ADAPTER, other=DEMO), InputError, "is a checkpoint, and .*: duat lora-diff BASE /"),
        (replace(BUNDLED, tuned=DEMO, lint=True), InputError, "--lint: is about adapters"),
        (replace(BUNDLED, tuned=DEMO, no_base=True), InputError, "--no-base: is about adapters"),
        (replace(BUNDLED, tuned="./nope"), CheckpointError, "./nope: no such folder"),
        (replace(BUNDLED, tuned=ADAPTER, other="./nope"), CheckpointError, "./nope: no such folder"),
    ],
)
def test_what_cannot_be_compared(request_: LoraRequest, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        answer(request_)


# -- weights read block by block -----------------------------------------------------------------------------------

TEXTS = PromptRequest(["abcde", "fgh"], None, None)
NAMES = {
    "llama": ["q_proj", "v_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": ["q_proj", "o_proj"],
}


def both(base: str, tuned: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report on weights that are all in memory, and on weights that are read block by block."""
    request = replace(BUNDLED, tuned=tuned, texts=TEXTS, base=replace(BASE, model=base))
    whole = answer(request)[0].model_dump(mode="json")
    with streaming():
        parts = answer(request)[0].model_dump(mode="json")
    assert whole["blocks"]
    return whole, parts


def made(model_type: str, folder: Path, **config: Any) -> tuple[str, str]:
    """A base with a tokenizer, and an adapter on it."""
    base = adapters.base_of(model_type, folder / "base")
    bad_checkpoints.tokenizer(base)
    fields = {"r": 3, "lora_alpha": 30, "target_modules": NAMES[model_type], **config}
    return str(base), str(adapters.make(base, folder / "adapter", peft.LoraConfig(**fields)))


@pytest.fixture
def every_layer_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout.layout.__kwdefaults__, "kept", 0)


@pytest.mark.parametrize("kind", ["adapter", "demo"])
def test_the_demo_read_block_by_block_has_the_same_report(
    kind: str, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two reads of each model beside what the comparison of weights takes, as planned."""
    base, tuned = str(short / "demo"), str(short / kind)
    pairs, head = list[Pair](), Pair.head
    monkeypatch.setattr(Pair, "head", lambda pair: (pairs.append(pair), head(pair))[1])
    whole, parts = both(base, tuned)
    assert parts == whole
    files = inspect_folder(Path(base))
    task = replace(task_of(Found(resolve(base), files), find_tuned(tuned), runs=True), tokens=(5, 3))
    read = sum(pager_of(one.loaded).bytes_read for one in (pairs[-1].base, pairs[-1].tuned)) / files.total_bytes
    looked_at = 1 + (tuned == base)
    assert weight_reads(shape_of(files, "float32"), task, "streamed") == pytest.approx(looked_at + read)
    assert read <= 4


@pytest.mark.usefixtures("every_layer_a_page")
@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_an_adapter_on_a_base_read_block_by_block_has_the_same_report(model_type: str, tmp_path: Path) -> None:
    whole, parts = both(*made(model_type, tmp_path))
    assert parts == whole


@pytest.mark.usefixtures("every_layer_a_page")
@pytest.mark.parametrize(
    "config", [{"use_dora": True, "modules_to_save": ["embed_tokens"]}, {"lora_bias": True}], ids=str
)
def test_every_way_to_change_a_weight_read_block_by_block(config: dict[str, Any], tmp_path: Path) -> None:
    """By the base's values, in an embedding whose rows are read, and where the base has no bias."""
    whole, parts = both(*made("llama", tmp_path, **config))
    assert parts == whole


@pytest.mark.usefixtures("every_layer_a_page")
def test_a_tuned_encoder_read_block_by_block_has_the_same_report(tmp_path: Path) -> None:
    base = adapters.base_of("bert", tmp_path / "base")
    bad_checkpoints.tokenizer(base)
    tuned = shutil.copytree(base, tmp_path / "tuned")
    weights, generator = load_file(tuned / "model.safetensors"), torch.Generator().manual_seed(1)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.01)
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    whole, parts = both(str(base), str(tuned))
    assert parts == whole


def test_a_tied_tensor_that_changes_in_one_place_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight: the same tensor .* give more --memory"):
        both(*made("gpt2", tmp_path, modules_to_save=["lm_head"]))


@pytest.mark.parametrize("paged", [True, False])
def test_two_models_that_do_not_fit_together_are_read_block_by_block(
    paged: bool, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def see(*given: Any, **named: Any) -> Any:
        asked.append(named["paged"])
        return load_files(*given, **named)

    monkeypatch.setattr("duat_cli.loading.model.load.load_files", see)
    demo = str(three / "demo")
    found = Found(resolve(demo), inspect_folder(Path(demo)))
    counts = TEXTS.counter(found, trust_remote_code=False)(TEXTS.read(lambda *_: None))
    task = replace(task_of(found, find_tuned(demo), runs=True), tokens=tuple(counts))
    both = plan(found.files, task, "float32", None).ways[0].peak_memory_bytes
    base = replace(BASE, model=demo, memory=both - 1 if paged else both)
    answer(replace(BUNDLED, base=base, tuned=demo, texts=TEXTS))
    assert asked == [paged, paged]

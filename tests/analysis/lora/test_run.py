"""The door of `duat lora-diff`: which comparison a folder asks for, and what is opened for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duat_cli.analysis.lora.run import LoraRequest, lora_diff
from duat_cli.analysis.opening import ModelRequest, PromptRequest
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport

DEMO, ADAPTER = str(demo_path()), str(demo_adapter_path())
BASE = ModelRequest(None, None, None, None, False, "float32", "cpu")
BUNDLED = LoraRequest(BASE, None, None, None, lint=False, no_base=False, large=False, cache=False)


def answer(request: LoraRequest) -> tuple[LoraReport, list[str]]:
    steps: list[str] = []
    run = Run(started="2026-01-01T00:00:00+00:00", seconds=0.0, peak_memory_bytes=None)
    report = lora_diff(request, lambda done, total, what: steps.append(what), lambda: run)
    return report, list(dict.fromkeys(steps))


@pytest.mark.parametrize(
    ("request_", "mode", "level"),
    [
        (BUNDLED, "adapter", "weights"),
        (replace(BUNDLED, tuned=ADAPTER, other=ADAPTER), "two adapters", "weights"),
        (replace(BUNDLED, lint=True), "adapter", "lint"),
        (replace(BUNDLED, tuned=DEMO), "checkpoint", "weights"),
        (replace(BUNDLED, texts=PromptRequest(["abc"], None, None)), "adapter", "prompts"),
        (replace(BUNDLED, tuned=DEMO, texts=PromptRequest(["abc"], None, None)), "checkpoint", "prompts"),
    ],
)
def test_what_is_compared(request_: LoraRequest, mode: str, level: str) -> None:
    report, steps = answer(request_)
    assert (report.mode, report.level) == (mode, level)
    assert ("loading torch and transformers" in steps) == (level == "prompts")
    assert steps.index("looking for the demo model") < steps.index("loading torch")


def test_no_base_reads_no_tensor_of_the_base() -> None:
    report, _ = answer(replace(BUNDLED, no_base=True))
    assert all(m.relative_frobenius is None for m in report.modules)
    assert all(m.relative_frobenius is not None for m in answer(BUNDLED)[0].modules)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (replace(BUNDLED, tuned=DEMO, other=ADAPTER), InputError, "two adapters can be compared, but"),
        (replace(BUNDLED, tuned=DEMO, lint=True), InputError, "--lint: is about adapters"),
        (replace(BUNDLED, tuned=DEMO, no_base=True), InputError, "--no-base: is about adapters"),
        (replace(BUNDLED, tuned="./nope"), CheckpointError, "./nope: no such folder"),
        (replace(BUNDLED, tuned=ADAPTER, other="./nope"), CheckpointError, "./nope: no such folder"),
    ],
)
def test_what_cannot_be_compared(request_: LoraRequest, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        answer(request_)

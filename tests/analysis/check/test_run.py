"""The door of `duat check`: what is looked at for the rules that are on, and why the rest is not."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import bad_checkpoints
import pytest
import torch
from paging import streaming
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.analysis.check.run import CheckRequest, check
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.opening import ModelRequest, PromptRequest, load_found
from duat_cli.checks.verdict.conclude import NO_FORWARD, plan
from duat_cli.errors import NoSignalError, UnsupportedModelError
from duat_cli.loading.checkpoint.source import demo_adapter_path
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.base import Run
from duat_cli.results.check import CheckReport
from duat_cli.zoo.tiny import tiny_model

RUN = Run(started="2026-01-01T00:00:00+00:00", seconds=0.0, peak_memory_bytes=None)


def checked(
    model: Path | None,
    *select: str,
    policy: str = "default",
    weights_only: bool = False,
    adapter: str | None = None,
    streamed: bool = False,
) -> tuple[CheckReport, list[str]]:
    """The report, and the steps to it. streamed: with weights read block by block."""
    steps = list[str]()
    request = CheckRequest(
        ModelRequest(None if model is None else str(model), None, None, None, False, "float32", "cpu"),
        PromptRequest([] if weights_only else ["abc"], None, None),
        adapter,
    )
    settled = plan(policy, select, None, False, weights_only, "float32")
    with streaming() if streamed else contextlib.nullcontext():
        report, text = check(
            settled, request, lambda done, total, what: steps.append(what), lambda _planned=None, **_: RUN
        )
    assert text is None
    return report, list(dict.fromkeys(steps))


def skipped(report: CheckReport) -> dict[str, str]:
    return {o.rule: o.message for o in report.outcomes if o.status == "skipped"}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_the_run_says_what_all_processes_held_together(checkpoint: Path) -> None:
    held = list[int]()

    def facts(_planned: int | None = None, /, *, device: str = "cpu", shared: int = 0) -> Run:
        held.append(shared)
        return RUN

    model = ModelRequest(str(checkpoint), None, None, None, False, "float32", "cpu")
    request = CheckRequest(model, PromptRequest(["abc", "ab", "a b c"], None, None), None, processes=2)
    report, _ = check(plan("default", (), None, False, False, "float32"), request, lambda *_: None, facts)
    assert report.prompts is not None
    assert len(report.prompts) == 3
    assert held[0] > 100 << 20


def test_tables_of_integers_are_no_quantised_weights(tmp_path: Path) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    mask, weight = "gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.dense.weight"
    bad_checkpoints.wedit(tmp_path, lambda s: s.update({mask: torch.ones(1, 1, 8, 8, dtype=torch.uint8)}))
    assert checked(tmp_path, "integrity.quantised", weights_only=True)[0].verdict == "passed"
    bad_checkpoints.wedit(tmp_path, lambda s: s.update({weight: s[weight].char()}))
    report, _ = checked(tmp_path, "integrity.quantised", weights_only=True)
    assert [(o.status, o.where) for o in report.outcomes] == [("failed", weight)]


def test_the_model_runs_only_where_a_rule_needs_it(checkpoint: Path) -> None:
    report, steps = checked(checkpoint, "integrity.files", "integrity.nonfinite")
    assert steps == [f"looking for {checkpoint}", "reading the weights"]
    assert report.model.fingerprint is None
    report, steps = checked(checkpoint, "exactness.*", "integrity.files")
    assert steps[:2] == ["reading the prompts", f"looking for {checkpoint}"]
    assert report.model.fingerprint is not None
    assert report.certificate is not None


def test_why_something_was_not_looked_at(checkpoint: Path) -> None:
    found = skipped(checked(checkpoint, weights_only=True)[0])
    assert NO_FORWARD in found["exactness.certificate"]
    assert any("no --adapter was given" in why for rule, why in found.items() if rule.startswith("adapter."))


def test_an_adapter_is_linted_against_the_model() -> None:
    adapter = str(demo_adapter_path())
    report, steps = checked(None, "adapter.*", adapter=adapter)
    assert steps[-2:] == [f"checking the adapter {adapter}", f"the model with the adapter {adapter}"]
    assert report.verdict == "passed"
    assert skipped(report) == {}


def test_a_bound_asks_for_what_takes_long(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[InspectOptions] = []

    def refuse(loaded: object, prompts: object, options: InspectOptions, progress: object, beside: object) -> None:
        asked.append(options)
        raise UnsupportedModelError("not today")

    monkeypatch.setattr("duat_cli.analysis.inspect.run.inspect", refuse)
    file = tmp_path / "p.toml"
    for bounds in ("", '[bounds]\n"blocks.*.operator.spectral_norm" = { max = 1e9 }\n'):
        file.write_text('extends = "default"\n' + bounds)
        with pytest.raises(UnsupportedModelError, match="not today; --weights-only checks what needs no forward pass"):
            checked(checkpoint, policy=str(file))
    assert [options.spectrum for options in asked] == [False, True]


def test_a_run_that_says_nothing_passes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*given: object) -> None:
        raise NoSignalError("every hidden state is zero")

    monkeypatch.setattr("duat_cli.analysis.inspect.run.inspect", silent)
    with pytest.raises(NoSignalError):
        checked(checkpoint, "exactness.*", "integrity.files")


@pytest.mark.parametrize("model_type", [None, "gpt2", "mixtral"])
def test_weights_read_block_by_block_make_the_same_report(model_type: str | None, tmp_path: Path) -> None:
    folder = None if model_type is None else saved(model_type, tmp_path)
    whole, parts = (checked(folder, streamed=streamed)[0].model_dump(mode="json") for streamed in (False, True))
    assert whole["certificate"] is not None
    assert parts == whole


@pytest.mark.parametrize(("value", "where"), [(math.nan, ""), (math.nan, "layers.1.mlp.down_proj"), (0.0, "")])
def test_broken_weights_read_block_by_block_make_the_same_report(value: float, where: str, tmp_path: Path) -> None:
    """Of NaN the run says nothing, wherever the first of them is read; of zeros it has no signal."""
    folder = saved("llama", tmp_path, lambda name, tensor: tensor.fill_(value) if where in name else None)
    reports = [checked(folder, "integrity.*", "exactness.*", streamed=streamed)[0] for streamed in (False, True)]
    whole, parts = (report.model_dump(mode="json") for report in reports)
    assert parts == whole
    assert whole["verdict"] == "failed"
    assert "exactness.certificate" in skipped(reports[0])


@pytest.mark.parametrize("where", ["layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "model.norm.weight"])
def test_finite_weights_that_overflow_are_a_finding(where: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, lambda name, tensor: tensor.fill_(3e38) if where in name else None)
    reports = [checked(folder, streamed=streamed)[0] for streamed in (False, True)]
    for report in reports:
        [found] = [one for one in report.outcomes if one.rule == "integrity.nonfinite"]
        assert found.status == "failed"
        assert found.message.startswith("no weight is NaN or infinite, and ")
        assert "not finite" in skipped(report)["exactness.certificate"]
    assert reports[0].outcomes == reports[1].outcomes


@pytest.mark.parametrize("streamed", [False, True])
def test_a_head_that_overflows_is_a_finding(streamed: bool, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, lambda name, tensor: tensor.fill_(3e38) if "lm_head" in name else None)
    report, _ = checked(folder, streamed=streamed)
    [found] = [one for one in report.outcomes if one.rule == "behaviour.logits"]
    assert found.status == "failed"
    assert found.message.endswith("are NaN or infinite")


def test_no_tensor_is_read_more_than_once_for_the_sketch_and_once_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = saved("llama", tmp_path), list[LoadedModel]()

    def keeping(*given: Any) -> tuple[LoadedModel, Any]:
        loaded, tokenizer = load_found(*given)
        opened.append(loaded)
        return loaded, tokenizer

    monkeypatch.setattr("duat_cli.analysis.opening.load_found", keeping)
    checked(folder, streamed=True)
    [loaded] = opened
    assert loaded.paged is not None
    assert loaded.paged.pager.bytes_read == loaded.files.total_bytes


def test_what_can_be_removed_is_the_same_of_weights_read_block_by_block(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('extends = "default"\n[rules]\n"pruning.heads" = { level = "error", max = 0.5 }\n')
    folder = saved("llama", tmp_path)
    whole, parts = (checked(folder, policy=str(file), streamed=streamed)[0] for streamed in (False, True))
    assert [outcome for outcome in whole.outcomes if outcome.rule == "pruning.heads"]
    assert parts.model_dump(mode="json") == whole.model_dump(mode="json")


def saved(model_type: str, folder: Path, edit: Callable[[str, Tensor], Any] = lambda name, tensor: None) -> Path:
    """A tiny random model with a tokenizer; `edit` changes stored tensors."""
    adapters.base_of(model_type, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        edit(name, tensor)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bad_checkpoints.tokenizer(folder)
    return folder

"""Eq. 18 on PEFT's own adapters: it holds where it should, by naive products, and planted faults of dW are seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import adapters
import helpers
import peft
import pytest
import torch
from adapters import weights_of
from helpers import quiet
from paging import streaming
from torch import Tensor, nn

import duat_cli
from duat_cli.analysis.lora import applied as lora_applied
from duat_cli.analysis.lora.report import adapter_pair, checkpoint_pair
from duat_cli.analysis.lora.weights.adapter_diff import adapter_report
from duat_cli.analysis.lora.weights.checkpoint_diff import checkpoint_report
from duat_cli.analysis.lora.weights.weight_change import Directions
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport

RUN = Run(started="now", seconds=0.0, peak_memory_bytes=None)
FFN = {
    "llama": (["gate_proj", "up_proj"], ["down_proj"]),
    "gpt2": (["c_fc"], ["mlp.c_proj"]),
    "opt": (["fc1"], ["fc2"]),
    "bert": (["intermediate.dense"], ["output.dense"]),
    "phi3": (["gate_up_proj"], ["down_proj"]),
}


def some_prompts(model: Any) -> list[Prompt]:
    ids = [helpers.token_ids(model, tokens=5 + k, seed=k) for k in range(2)]
    return [Prompt(f"text {k}", "0" * 64, i, k) for k, i in enumerate(ids)]


def report_of(base: Path, adapter: Path, dtype: str = "float32") -> LoraReport:
    opened = open_adapter(adapter, "adapter")
    first = adapter_report(weights_of(base), [opened], Directions(), quiet, lambda **_: RUN)
    loaded = load(str(base), dtype=dtype)
    with adapter_pair(first, weights_of(base), opened, loaded, quiet) as pair:
        return pair.report(some_prompts(loaded.model), str, lambda **_: RUN)


def made(model_type: str, folder: Path, targets: list[str], **config: Any) -> tuple[Path, Path]:
    base = adapters.base_of(model_type, folder / "base")
    fields = {"r": 3, "lora_alpha": 30, "target_modules": targets, **config}
    return base, adapters.make(base, folder / "adapter", peft.LoraConfig(**fields))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made("llama", tmp_path_factory.mktemp("eq18"), ["up_proj", "down_proj", "q_proj"])


@pytest.fixture(scope="module")
def slight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, LoraReport]:
    """A base, an adapter with dW 2e-4 of W, and the report in float32."""
    base, adapter = made("llama", tmp_path_factory.mktemp("slight"), ["up_proj"], lora_alpha=0.01)
    return base, adapter, report_of(base, adapter)


@pytest.mark.parametrize("model_type", FFN)
def test_it_holds_in_every_layer_of_the_ffns(model_type: str, tmp_path: Path) -> None:
    second, third = FFN[model_type]
    base, adapter = made(model_type, tmp_path, [*second, *third])
    found = report_of(base, adapter).eq18
    assert found is not None
    assert (found.holds, found.failed, found.not_covered) == (True, [], [])
    for names, ends in ((found.on_second, second), (found.on_third, third)):
        assert names
        assert all(name.removesuffix(".weight").endswith(tuple(ends)) and ".attention." not in name for name in names)
    assert found.relative_error is not None
    assert found.relative_error < 2e-6
    assert found.change_error is not None
    assert found.change_error < 1e-5
    assert found.inputs == 11


def test_the_errors_are_those_of_naive_products(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tuned model whose dW is 1 % too large everywhere, on PEFT's merged model and a plain loop over tokens."""
    base, adapter = llama
    _plant(monkeypatch, lambda name, change: 1.01 * change)
    found = report_of(base, adapter).eq18
    assert found is not None
    plain, change = adapters.load_base(base), adapters.merged(base, adapter)
    tuned = adapters.load_base(base)
    inputs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, module in tuned.named_modules():
        if name.endswith(("up_proj", "down_proj", "q_proj")):
            module.weight.data += (1.01 * change[f"{name}.weight"]).float()
            into = inputs.setdefault(name, [])
            module.register_forward_hook(lambda m, a, y, into=into: into.extend(zip(a[0][0], y[0], strict=True)))
    with torch.no_grad():
        for prompt in some_prompts(load(str(base)).model):
            tuned(input_ids=prompt.input_ids)
    errors = []
    for name in [n for n in inputs if "mlp" in n]:
        w, dw = plain.get_submodule(name).weight.double(), change[f"{name}.weight"]
        missed = torch.stack([y.double() - (w @ x.double() + dw @ x.double()) for x, y in inputs[name]])
        errors.append(float(missed.detach().norm() / torch.stack([y.double() for _, y in inputs[name]]).norm()))
    assert found.relative_error == pytest.approx(max(errors), rel=1e-3)
    assert found.change_error == pytest.approx(0.01, rel=1e-3)


# -- planted faults --------------------------------------------------------------------------------------------


def _plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str, Tensor], Tensor]) -> None:
    """The tuned model is built with another change than the adapter states."""
    real = lora_applied.tuned_copy

    def faulty(model: nn.Module, changes: Mapping[str, Callable[[], Tensor]], **more: Any) -> nn.Module:
        wrong = {name: (lambda name=name, change=change: fault(name, change())) for name, change in changes.items()}
        return real(model, wrong, **more)

    monkeypatch.setattr(lora_applied, "tuned_copy", faulty)


ONE = "layers.1.mlp.up_proj"


def _scaled(name: str, change: Tensor) -> Tensor:
    return 1.01 * change if ONE in name else change


def _forgotten(name: str, change: Tensor) -> Tensor:
    return 0 * change if ONE in name else change


@pytest.mark.parametrize(("fault", "size"), [(_scaled, 0.01), (_forgotten, 1.0)])
def test_a_planted_fault_is_seen_in_its_layer(
    fault: Callable[[str, Tensor], Tensor], size: float, llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuned model's certificate cannot see it: the model is another, and exact as that."""
    _plant(monkeypatch, fault)
    report = report_of(*llama)
    assert report.eq18 is not None
    assert (report.eq18.holds, report.eq18.failed) == (False, [f"model.{ONE}"])
    assert report.eq18.change_error == pytest.approx(size, rel=1e-3)
    assert report.tuned_certificate is not None
    assert report.tuned_certificate.exact


def test_a_small_change_hides_no_fault(slight: tuple[Path, Path, LoraReport], monkeypatch: pytest.MonkeyPatch) -> None:
    """dW 2e-4 of W: 1 % of it is far below the tolerance of the sum, and far above the rounding of the weights."""
    base, adapter, sound = slight
    assert sound.eq18 is not None
    assert sound.eq18.holds
    _plant(monkeypatch, _scaled)
    found = report_of(base, adapter).eq18
    assert found is not None
    assert found.relative_error is not None
    assert found.relative_error < found.tolerance
    assert (found.holds, found.failed) == (False, [f"model.{ONE}"])


def test_a_layer_that_changes_without_being_stated(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = lora_applied.tuned_copy

    def more(model: nn.Module, changes: Mapping[str, Any], **rest: Any) -> nn.Module:
        name = "model.layers.0.mlp.gate_proj.weight"
        return real(model, {**changes, name: lambda: 0.1 * model.get_parameter(name).double()}, **rest)

    monkeypatch.setattr(lora_applied, "tuned_copy", more)
    found = report_of(*llama).eq18
    assert found is not None
    assert (found.holds, found.failed) == (False, ["model.layers.0.mlp.gate_proj"])


def test_a_checkpoint_is_tested_against_the_difference_of_its_files(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).merge_and_unload().save_pretrained(tmp_path)
    first = checkpoint_report(weights_of(base), weights_of(tmp_path), Directions(), quiet, lambda **_: RUN)

    def found(fault: Callable[[Any], None]) -> Any:
        tuned = load(str(tmp_path))
        fault(tuned.model)
        with checkpoint_pair(first, load(str(base)), tuned, quiet) as pair:
            return pair.report(some_prompts(tuned.model), str, lambda **_: RUN).eq18

    sound = found(lambda model: None)
    assert (sound.holds, len(sound.on_second), len(sound.on_third)) == (True, 2, 2)
    assert found(lambda model: model.get_submodule(f"model.{ONE}").weight.mul_(1.001)).failed == [f"model.{ONE}"]


# -- what it does not cover ------------------------------------------------------------------------------------


def test_attention_alone_is_no_matter_of_eq18(tmp_path: Path) -> None:
    base, adapter = made("llama", tmp_path, ["q_proj", "v_proj", "o_proj"])
    found = report_of(base, adapter).eq18
    assert found is not None
    assert (found.holds, found.relative_error, found.change_error) == (None, None, None)
    assert len(found.through_attention) == 6
    assert "no linear layer of an FFN changes" in found.reasons["holds"]


def test_experts_and_norms_are_named_with_their_reasons(tmp_path: Path) -> None:
    targets = {"target_parameters": ["mlp.experts.down_proj"], "modules_to_save": ["post_attention_layernorm"]}
    base, adapter = made("qwen3_moe", tmp_path, ["v_proj"], **targets)
    found = report_of(base, adapter).eq18
    assert found is not None
    assert found.holds is None
    reasons = {entry.what.rpartition(".layers.")[2]: entry.why for entry in found.not_covered}
    assert "not made by one linear layer of its neurons" in reasons["1.mlp.experts.down_proj"]  # block 0 has none
    assert reasons["0.post_attention_layernorm.weight"] == "it is no linear layer of the block's FFN"


def test_in_half_precision_blocks_read_one_by_one_give_the_same(tmp_path: Path) -> None:
    base, adapter = made("llama", tmp_path, ["up_proj", "down_proj"])
    ids = [list(range(3, 9))]
    resident = duat_cli.lora_diff(base, adapter, prompts=ids, dtype="bfloat16").eq18
    with streaming():
        streamed = duat_cli.lora_diff(base, adapter, prompts=ids, dtype="bfloat16").eq18
    assert "rounding to bfloat16" in resident.not_covered[0].why  # so its layers were found and tested
    assert resident == streamed


def test_what_rounding_hides_is_not_called_sound(slight: tuple[Path, Path, LoraReport]) -> None:
    """In bfloat16 a change of 2e-4 of W is rounded away: neither it holds nor it fails."""
    base, adapter, in_float32 = slight
    report = report_of(base, adapter, "bfloat16")
    found = report.eq18
    assert found is not None
    assert found.holds is None
    assert "rounding to bfloat16" in found.not_covered[0].why
    assert any("run in bfloat16: a change of less than its rounding, 0.008 of a weight" in w for w in report.warnings)
    assert not any("run in" in warning for warning in in_float32.warnings)


@pytest.mark.parametrize(("base_dtype", "said"), [("float32", True), ("bfloat16", False)])
def test_a_change_that_the_run_rounds_away_is_no_silent_zero(base_dtype: str, said: bool, tmp_path: Path) -> None:
    """A float32 checkpoint and its bfloat16 copy are one model in bfloat16."""
    model = adapters.load_base(adapters.base_of("llama", tmp_path / "made")).to(getattr(torch, base_dtype))
    base, copy = tmp_path / "base", tmp_path / "copy"
    model.save_pretrained(base)
    model.bfloat16().save_pretrained(copy)
    first = checkpoint_report(weights_of(base), weights_of(copy), Directions(), quiet, lambda **_: RUN)
    loaded, tuned = (load(str(one), dtype="bfloat16") for one in (base, copy))
    with checkpoint_pair(first, loaded, tuned, quiet) as pair:
        report = pair.report(some_prompts(loaded.model), str, lambda **_: RUN)
    assert report.summary.kl == 0
    assert any("moves no block, KL or loss" in warning for warning in report.warnings) == said


def test_of_a_cast_of_the_base_nothing_is_said_to_hold(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = llama
    adapters.load_base(base).bfloat16().save_pretrained(tmp_path)
    first = checkpoint_report(weights_of(base), weights_of(tmp_path), Directions(), quiet, lambda **_: RUN)
    with checkpoint_pair(first, load(str(base)), load(str(tmp_path), dtype="float32"), quiet) as pair:
        found = pair.report(some_prompts(load(str(base)).model), str, lambda **_: RUN).eq18
    assert found is not None
    assert (found.holds, found.relative_error, found.on_second, found.on_third) == (None, None, [], [])
    assert found.reasons["holds"].startswith("no linear layer of an FFN changes")

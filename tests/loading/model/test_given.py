"""A model in memory: what runs is that model, and the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

from duat_cli.checks.weights import facts_of
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.checkpoint import stream
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import single_file
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.loading.model.given import given, streamed
from duat_cli.zoo import tiny

IDS = torch.tensor([[11, 12, 13, 14, 15, 12]])


def adapted(model_type: str = "llama", **options: Any) -> Any:
    """A tiny model with LoRA whose B is not zero, as after training."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    model = peft.get_peft_model(tiny.tiny_model(model_type), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def state(model: Any) -> dict[str, Any]:
    """Everything that a caller could see change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "values": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "memory": {name: value.data_ptr() for name, value in tensors},
        "objects": {name: id(value) for name, value in tensors},
        "requires_grad": {name: value.requires_grad for name, value in tensors},
        "grad": {name: None if value.grad is None else value.grad.clone() for name, value in tensors},
        "training": {name: module.training for name, module in model.named_modules()},
        "modules": {name: (id(module), type(module)) for name, module in model.named_modules()},
        "own": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: [*module._forward_hooks, *module._forward_pre_hooks] for name, module in model.named_modules()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2_moe"])
def test_it_runs_as_the_model_does_and_shares_its_weights(model_type: str) -> None:
    model = tiny.tiny_model(model_type)
    loaded = given(model)
    assert torch.allclose(logits(loaded.model), logits(model), atol=1e-5)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in loaded.model.parameters()} == own
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.files.total_bytes == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("make", [lambda: tiny.tiny_model("llama"), adapted], ids=["plain", "peft"])
def test_the_model_stays_as_it_was(make: Callable[[], Any]) -> None:
    model = make().train()
    model.register_forward_hook(lambda *args: None)
    model.set_attn_implementation("sdpa") if hasattr(model, "set_attn_implementation") else None
    model(input_ids=IDS, labels=IDS).loss.backward()
    before = state(model)
    loaded = given(model)
    logits(loaded.model)
    assert same(state(model), before)
    assert not loaded.model.training


def test_the_comparison_can_fail() -> None:
    model = tiny.tiny_model("llama")
    before = state(model)
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1
    assert not same(state(model), before)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_of_a_peft_model_the_adapters_are_merged(options: dict[str, Any]) -> None:
    model = adapted(**options)
    before, loaded = state(model), given(model)
    assert torch.allclose(logits(loaded.model), logits(model), atol=1e-4)
    with model.disable_adapter():
        assert not torch.allclose(logits(loaded.model), logits(model), atol=1e-3)
    assert same(state(model), before)
    assert any("merged" in note for note in loaded.warnings)
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())


def test_a_disabled_adapter_is_left_out() -> None:
    model = adapted()
    with model.disable_adapter():
        loaded = given(model)
        assert torch.allclose(logits(loaded.model), logits(model), atol=1e-5)
    assert any("disabled" in note for note in loaded.warnings)
    assert not torch.allclose(logits(loaded.model), logits(model), atol=1e-3)


def test_a_merged_adapter_is_not_merged_twice() -> None:
    model = adapted()
    expected = logits(model)
    model.merge_adapter()
    assert torch.allclose(logits(given(model).model), expected, atol=1e-4)


def test_a_compiled_block_is_taken_as_what_it_compiles() -> None:
    model = tiny.tiny_model("llama")
    expected = logits(model)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    held = given(model).model
    assert torch.equal(logits(held), expected)
    assert not any("_orig_mod" in name for name in held.state_dict())
    assert any("_orig_mod" in name for name in model.state_dict())


def test_a_compiled_model_is_taken_as_what_it_compiles() -> None:
    model = tiny.tiny_model("llama")
    assert torch.allclose(logits(given(torch.compile(model)).model), logits(model), atol=1e-5)


def test_backward_hooks_are_left_out_and_said() -> None:
    model = tiny.tiny_model("llama")
    model.model.layers[1].mlp.register_full_backward_hook(lambda _module, grads, _outputs: (5 * grads[0],))
    loaded = given(model)
    mine, own = (copied.model.layers[1].mlp for copied in (loaded.model, model))
    x = torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    found, hooked = (torch.autograd.grad(mlp(x).sum(), x)[0] for mlp in (mine, own))
    assert torch.allclose(5 * found, hooked, rtol=1e-4)
    assert any(note.startswith("backward hooks of 'model.layers.1.mlp' are left out") for note in loaded.warnings)


def test_of_a_model_made_in_inference_mode_gradients_can_be_had() -> None:
    with torch.inference_mode():
        model = tiny.tiny_model("llama")
    held = given(model).model
    assert torch.equal(logits(held), logits(model))
    assert not any(value.is_inference() for value in [*held.parameters(), *held.buffers()])
    assert all(value.is_inference() for value in model.parameters())


def test_weights_that_are_no_numbers_are_counted() -> None:
    model = tiny.tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, :3] = torch.nan
    assert given(model).nonfinite_weights == {"model.layers.1.mlp.up_proj.weight": 3}


def prompt_tuned() -> Any:
    return peft.get_peft_model(
        tiny.tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )


def in_float8() -> Any:
    model = tiny.tiny_model("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def normed_before_every_pass(by: Callable[[nn.Module, str], Any]) -> Any:
    model = tiny.tiny_model("llama")
    by(model.model.layers[0].mlp.up_proj, "weight")
    return model


def quantised() -> Any:
    return torch.ao.quantization.quantize_dynamic(tiny.tiny_model("llama"), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: nn.Linear(2, 2), InputError, "a Linear was given: expected a transformers model"),
        (lambda: 3, InputError, "a int was given"),
        (lambda: tiny.tiny_model("llama").to("meta"), UnsupportedModelError, "not in memory"),
        (in_float8, UnsupportedModelError, "up_proj.weight is a Tensor of torch.float8_e4m3fn"),
        (prompt_tuned, UnsupportedModelError, "PROMPT_TUNING: puts vectors in front of the tokens"),
        (
            lambda: normed_before_every_pass(nn.utils.weight_norm),
            UnsupportedModelError,
            r"layers\.0\.mlp\.up_proj\.weight is computed before every pass; .* makes it a weight of its own",
        ),
        (
            lambda: normed_before_every_pass(prune.identity),
            UnsupportedModelError,
            r"up_proj\.weight is computed before every pass; torch\.nn\.utils\.prune\.remove",
        ),
        (quantised, UnsupportedModelError, r"q_proj is quantised; give the model as it was before"),
    ],
    ids=["a layer", "a number", "on meta", "float8", "prompt tuning", "weight norm", "pruned", "quantised"],
)
def test_what_cannot_be_taken_is_one_line(make: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        given(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_facts_of_values_in_memory_are_those_of_the_file(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("checkpoint.stream", "model.given"):
        monkeypatch.setattr(f"duat_cli.loading.{module}.PIECE", 60)
        monkeypatch.setattr(f"duat_cli.loading.{module}.LONGEST_ROW", 50)
    torch.manual_seed(0)
    model = nn.Module()
    shapes = {"matrix": (7, 33), "long": (3, 120), "vector": (91,), "stack": (2, 5, 9), "one": (1,), "empty": (0, 4)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype), requires_grad=name != "one"))
    with torch.no_grad():
        model.get_parameter("matrix")[2] = 0
        model.get_parameter("stack")[:, :, 4] = 0
        model.get_parameter("vector")[3] = float("nan")
    path = tmp_path / "w.safetensors"
    save_file({name: p.detach() for name, p in model.named_parameters()}, path)
    files = single_file(path)
    names = {kind: name for name, kind in STORED.items()}
    entries = {n: TensorEntry(tuple(p.shape), names[p.dtype], "", 0, 0) for n, p in model.named_parameters()}
    found = facts_of(streamed(model, entries), len(entries), lambda *_: None).tensors
    expected = facts_of(stream.stream(files), len(entries), lambda *_: None).tensors
    assert found.keys() == expected.keys() == shapes.keys() - {"empty"}
    for name, facts in found.items():
        other = expected[name]
        assert (facts.rows, facts.columns, facts.nonfinite) == (other.rows, other.columns, other.nonfinite)
        assert (facts.norm, facts.sketch) == (other.norm, other.sketch) or name == "vector"
        assert np.array_equal(facts.zero_rows, other.zero_rows)
        assert np.array_equal(facts.zero_columns, other.zero_columns)
    assert found["vector"].nonfinite == 1
    assert found["matrix"].zero_rows.tolist() == [2]
    assert found["stack"].zero_columns.tolist() == [4]
    assert found["matrix"].norm == pytest.approx(float(model.get_parameter("matrix").double().norm()), rel=1e-6)

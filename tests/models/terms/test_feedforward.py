"""The inner form of FFNs, whatever stores their weights; and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, single_model
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.modality import probe_ids
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.tracing import Trace, trace
from duat_cli.models.terms.feedforward import FeedForward, evaluate, find_feedforward

# model type -> activation, gated, neurons of the tiny model
FORMS = {
    "llama": ("silu", True, 48),
    "gemma2": ("gelu (tanh)", True, 48),
    "phi3": ("silu", True, 48),  # gate and up fused
    "granite": ("silu", True, 48),
    "gpt2": ("gelu (tanh)", False, 128),  # Conv1D
    "bert": ("gelu", False, 48),  # the layers stand in two modules
    "opt": ("relu", False, 48),  # the layers stand in the block
    "bloom": ("gelu (tanh)", False, 128),
    "mpt": ("gelu", False, 128),
    "t5": ("relu", False, 48),
    "nemotron": ("relu squared", False, 48),
    "albert": ("gelu (tanh)", False, 48),  # one block, called again and again
}


def forms(model: Any) -> list[tuple[FeedForward, Trace]]:
    structure = discover(model)
    ids = probe_ids(structure.stack, 11)
    written = trace(structure.stack, lambda: run_stack(structure.stack, ids))
    return [
        (find_feedforward(unit, written, block.parts.module), written)
        for block in structure.blocks
        for unit in block.parts.units
    ]


@pytest.mark.parametrize("model_type", list(FORMS))
def test_the_form_is_found_and_gives_the_units_own_output(model_type: str) -> None:
    activation, gated, neurons = FORMS[model_type]
    for form, written in forms(single_model(model_type)):
        assert (form.activation.name, form.gate is not None, form.neurons) == (activation, gated, neurons)
        made = evaluate(form, form.source)
        event = next(e for e in written.events if e.module is form.down and far(made, e.output) < 1e-5)
        assert far(made, event.output) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_other_dtypes(dtype: torch.dtype) -> None:
    for model_type in ("llama", "bert", "gpt2"):
        for form, _ in forms(single_model(model_type).to(dtype)):
            assert (form.activation.name, form.gate is not None) == FORMS[model_type][:2]
            assert form.columns().dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("bias", [-1e4, 1e3])
def test_a_neuron_with_a_large_bias_hides_no_form(bias: float) -> None:
    model = single_model("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias[3] = bias
    for form, _ in forms(model):
        assert form.activation.name == "gelu (tanh)"


def test_rows_and_columns_are_the_weights() -> None:
    model = single_model("phi3")
    form, _ = forms(model)[0]
    mlp = model.model.layers[0].mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    assert form.gate is not None
    assert torch.equal(form.rows(form.gate)[0], gate)
    assert torch.equal(form.rows(form.up)[0], up)
    assert torch.equal(form.columns(), mlp.down_proj.weight.T)
    assert (form.down, form.linears) == (mlp.down_proj, (mlp.gate_up_proj,))


class Strange(nn.Module):
    """An FFN whose activation nobody knows, or that does something more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.kind == "unknown":
            return self.down(torch.sin(h))
        if self.kind == "clipped":
            return self.down(functional.silu(h).clamp(max=7.0))
        if self.kind == "scaled":
            return 1.5 * self.down(functional.silu(h))
        return self.down(functional.silu(h))


class Holder(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.unit(x)


def strange(kind: str) -> FeedForward:
    torch.manual_seed(0)
    holder = Holder(Strange(kind))
    holder.requires_grad_(False)
    holder.set_attn_implementation = lambda name: None  # type: ignore[assignment]
    holder.config = PreTrainedConfig()  # type: ignore[assignment]
    written = trace(holder, lambda: holder(torch.randn(1, 11, 16)))
    return find_feedforward(holder.unit, written, holder)


@pytest.mark.parametrize(("kind", "reason"), [
    ("unknown", "no known activation"), ("clipped", "no known activation"), ("scaled", "not made by one linear layer"),
])  # fmt: skip
def test_what_has_another_form_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        strange(kind)
    assert strange("plain").activation.name == "silu"


def test_routed_experts_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="MixtralSparseMoeBlock"):
        forms(single_model("mixtral"))


def test_nothing_stays_hooked() -> None:
    model = single_model("llama")
    forms(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_mixer_is_refused() -> None:
    """It is nonlinear, and is handed a mask of the prompt's length."""
    with pytest.raises(UnsupportedModelError, match="MambaMixer does not run on other vectors than its block's tokens"):
        forms(single_model("mamba"))

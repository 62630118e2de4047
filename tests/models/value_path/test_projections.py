"""V and O with their biases as layers apply them, what feeds them, and what attention must be for a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, single_model
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover, probe_trace
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.value_path.projections import layer_factors, norm_before, require_averages
from duat_cli.operators.kronecker import HeadFactors

NORMS = {
    "llama": "layers.1.input_layernorm", "gpt2": "h.1.ln_1", "falcon": "h.1.input_layernorm",
    "bert": "encoder.layer.0.output.LayerNorm", "deepseek_v3": "layers.1.self_attn.kv_a_layernorm",
    "gptj": "h.1.ln_1", "bloom": "h.1.input_layernorm",
}  # fmt: skip


def factors_of(model: Any, block: int = 1) -> tuple[Tensor, HeadFactors, Trace, Any, Any]:
    structure = discover(model)
    written = probe_trace(structure.stack)
    call = written.attention[block]
    return *layer_factors(structure.block(block).parts, written, call), written, call, structure


@pytest.mark.parametrize("model_type", list(NORMS))
def test_values_are_the_source_times_v(model_type: str) -> None:
    """Fused, interleaved, copied or from a latent: V and its bias give the values that attention got."""
    source, factors, written, call, structure = factors_of(single_model(model_type))
    values = torch.einsum("nm,kmd->knd", source.reshape(-1, source.shape[-1]), factors.value)
    values = values if factors.value_bias is None else values + factors.value_bias[:, None]
    assert far(values, call.value[0]) <= 1e-5
    assert factors.groups == call.output.shape[2] // call.value.shape[1]
    assert norm_before(written.events, source) is structure.stack.get_submodule(NORMS[model_type])


def test_what_no_norm_feeds_has_none() -> None:
    for model_type, block in (("olmo2", 1), ("albert", 0)):
        source, _, written, _, _ = factors_of(single_model(model_type), block)
        with pytest.raises(UnsupportedModelError, match="not the output of a norm"):
            norm_before(written.events, source)


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_values_that_no_layer_gives_are_refused() -> None:
    model = single_model("llama")
    layer = model.model.layers[1].self_attn.v_proj
    model.model.layers[1].self_attn.v_proj = torch.nn.Sequential(layer, Double())
    with pytest.raises(UnsupportedModelError, match="not what one linear layer gives"):
        factors_of(model)


@pytest.mark.parametrize(("low", "total", "reason"), [(-0.2, 0.5, "negative"), (0.0, 1.2, "more than 1")])
def test_attention_that_is_no_average_is_refused(low: float, total: float, reason: str) -> None:
    class Rows:
        def chunks(self) -> Any:
            yield slice(0, 2), torch.tensor([[[low, total - low], [0.5, 0.5]]])

    call: Any = type("Call", (), {"rows": Rows()})
    with pytest.raises(UnsupportedModelError, match=reason):
        require_averages(call)

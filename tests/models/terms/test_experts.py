"""The form of routed experts, against an evaluation by hand; and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, single_model
from torch.nn import functional

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover, probe_trace
from duat_cli.models.terms.experts import Experts, find_experts
from duat_cli.models.terms.sites import find_sites


def experts_of(model: Any, block: int = 1) -> Experts:
    structure = discover(model)
    written = probe_trace(structure.stack)
    (site,) = find_sites(structure)[structure.calls[block]].of("expert")
    unit = next(u for u in structure.block(block).parts.units if site.module in set(u.modules()))
    return find_experts(unit, site, written, 0)


@pytest.mark.parametrize(("model_type", "routing", "shared"), [
    ("mixtral", 1.0, False), ("minimax_m2", 1.0, False), ("deepseek_v3", 2.5, True),
])  # fmt: skip
def test_experts_are_found_and_are_their_weights(model_type: str, routing: float, shared: bool) -> None:
    found = experts_of(single_model(model_type))
    assert (found.activation.name, found.count, found.complete) == ("silu", 4, True)
    assert (found.shared is not None) == shared
    assert found.routing == pytest.approx(routing, rel=1e-5)
    assert found.factor == pytest.approx(1.0, rel=1e-5)
    module: Any = found.module
    z = torch.randn(6, 32)
    for expert in range(4):
        gate, up = (z @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
        expected = (functional.silu(gate) * up) @ module.down_proj[expert].T
        assert far(found.evaluate(expert, z), expected) <= 1e-5


@pytest.mark.parametrize("model_type", ["olmoe", "qwen2_moe"])
def test_routing_weights_without_a_limit_leave_the_form(model_type: str) -> None:
    found = experts_of(single_model(model_type))
    assert (found.activation.name, found.count) == ("silu", 4)
    assert "do not sum to the same" in str(found.routing)


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no known activation"):
        experts_of(single_model("gpt_oss"))


def test_half_precision_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="float32"):
        experts_of(single_model("mixtral").to(torch.bfloat16))


def test_what_else_a_unit_adds_is_noticed() -> None:
    """deepseek's block with its shared expert's output squashed: no FFN gives the rest any more."""
    model = single_model("deepseek_v3")
    shared = model.model.layers[1].mlp.shared_experts
    original = shared.forward
    shared.forward = lambda x: torch.tanh(original(x))
    found = experts_of(model)
    assert (found.shared, found.complete) == (None, False)

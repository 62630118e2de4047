"""How branches reach the stream, on models whose wiring is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model, sweep, token_ids

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import matrix_of
from duat_cli.models.terms import branches
from duat_cli.models.terms.branches import BlockArrivals, block_arrivals

# model type -> factor, attention's norm, the FFN's norm, whether the stream passes through the block
WIRING = {
    "llama": (1.0, None, None, True),
    "granite": (0.6, None, None, True),
    "gpt_neox": (1.0, None, None, True),
    "gemma2": (1.0, "post_attention_layernorm", "post_feedforward_layernorm", True),
    "olmo2": (1.0, "post_attention_layernorm", "post_feedforward_layernorm", True),
    "bert": (1.0, None, None, False),
}


def arrivals(model_type: str) -> tuple[list[BlockArrivals], Any]:
    model = single_model(model_type)
    found = []

    def listen(run: Any, step: Any, block: Any) -> None:
        heads, width = run.attention[0].output.shape[2:]
        output = matrix_of(run.parts.output_projection.linear, heads * width)
        outside = run.parts.module.output.dense if model_type == "bert" else None
        found.append(block_arrivals(run, output, lambda k: None if outside is None else matrix_of(outside, 48), []))

    return found, sweep(model, token_ids(model), listen)


@pytest.mark.parametrize("model_type", list(WIRING))
def test_the_wiring_is_found(model_type: str) -> None:
    factor, first, second, through = WIRING[model_type]
    found, structure = arrivals(model_type)
    for block, module in zip(found, structure.calls, strict=True):
        names = {norm: name for name, norm in module.named_modules()}
        for arrival, norm in ((block.attention, first), (block.units[0], second)):
            assert not isinstance(arrival, str), arrival
            assert arrival.factor == pytest.approx(factor, rel=1e-5)
            assert arrival.factor >= factor
            assert (None if arrival.norm is None else names[arrival.norm]) == norm
        assert block.through == through


def test_a_branch_that_is_not_what_was_said_is_refused() -> None:
    """O with one row changed is not what the block adds."""
    model = single_model("llama")
    reasons = []

    def listen(run: Any, step: Any, block: Any) -> None:
        heads, width = run.attention[0].output.shape[2:]
        output = matrix_of(run.parts.output_projection.linear, heads * width).clone()
        output[3] *= 1.1
        reasons.append(block_arrivals(run, output, lambda k: None, []).attention)

    sweep(model, token_ids(model), listen)
    assert all("does not arrive" in str(reason) for reason in reasons)


def test_a_factor_is_one_number_for_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(5, 8, generator=generator)
    assert branches._factor(sent, 0.3 * sent, torch.float32) == pytest.approx(0.3)
    for arrived in (sent * torch.rand(5, 1, generator=generator), sent.roll(1, 0), sent[:, :4]):
        with pytest.raises(UnsupportedModelError):
            branches._factor(sent, arrived, torch.float32)

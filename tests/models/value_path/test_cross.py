"""W'_c against dense arithmetic with the model's own weights and attention weights."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import torch
from decoders import attentions, given_to, through
from helpers import single_model
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error
from duat_cli.models.discovery.modality import STATES
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.cross import cross_operator
from duat_cli.models.value_path.operator import AttentionOperator


def operators(model: Any) -> list[AttentionOperator]:
    found = []

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert block.cross is not None, block.cross_reason
        found.append(cross_operator(run, block.cross))

    through(model, listen)
    return found


def dense(weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """W'_c written out, (N M, K width): weights (heads, N, K), value and output as nn.Linear holds them."""
    heads = len(weights)
    v = value.T.unflatten(1, (heads, -1)).permute(1, 0, 2)  # (heads, width, d)
    o = output.T.unflatten(0, (heads, -1))  # (heads, d, M)
    blocks = torch.einsum("hnk,hwd,hdm->nmkw", weights, v, o)
    return blocks.flatten(2).flatten(0, 1)


LAYERS = {
    "t5": lambda model: [
        (block.layer[1].EncDecAttention.v, block.layer[1].EncDecAttention.o) for block in model.decoder.block
    ],
    "bart": lambda model: [
        (layer.encoder_attn.v_proj, layer.encoder_attn.out_proj) for layer in model.model.decoder.layers
    ],
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("model_type", LAYERS)
def test_it_is_the_dense_matrix(model_type: str, zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """zero: one of the encoder's states is the zero vector, and has its columns all the same."""
    model = single_model(model_type).double()
    given = given_to(model)
    if zero:
        given[STATES][:, 1] = 0.0
        monkeypatch.setattr(decoders, "given_to", lambda model: given)
    states, out = given[STATES][0], attentions(model)
    for operator, weights, (v, o) in zip(
        operators(model), out.cross_attentions, LAYERS[model_type](model), strict=True
    ):
        truth = dense(weights[0], v.weight.detach(), o.weight.detach())
        mine = torch.einsum("hnk,hwm->nmkw", operator.matrix().left, operator.factors.maps())
        assert relative_error(mine.flatten(2).flatten(0, 1), truth) < 1e-10
        image = operator.matrix().apply(states)
        assert relative_error(image.flatten(), truth @ states.flatten()) < 1e-10
        assert operator.error < 1e-10


def test_a_norm_behind_cross_attention_is_in_its_scale() -> None:
    """T5Gemma has one on the branch: t differs from token to token."""
    for operator in operators(single_model("t5gemma")):
        assert operator.token_scale.numel() > 1
        assert operator.error < 1e-5


def test_values_that_are_no_layers_output_have_no_factors() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0

    model, seen = single_model("bart"), []
    for layer in model.model.decoder.layers:
        own = layer.encoder_attn.v_proj
        layer.encoder_attn.v_proj = Doubled(own.in_features, own.out_features)
        layer.encoder_attn.v_proj.load_state_dict(own.state_dict())
    through(model, lambda run, block: seen.append(block.cross_reason))
    assert all(reason is not None and "is not the matrix that it applies" in reason for reason in seen)


def test_another_h_is_refused() -> None:
    """The proof can fail: factors of other weights do not give what the block's own cross-attention adds."""
    model = single_model("bart")

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert block.cross is not None
        with torch.no_grad():
            block.parts.cross.module.out_proj.weight.mul_(1.5)  # type: ignore[union-attr, operator]
        with pytest.raises(UnsupportedModelError, match="factors leave a relative residual"):
            cross_operator(run, block.cross)

    through(model, listen)

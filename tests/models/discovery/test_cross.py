"""Cross-attention of decoders: found by what it reads, proved affine in the states, refused where it is mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model
from torch import nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.modality import STATES, decoder_of
from duat_cli.models.discovery.structure import ModelStructure, discover


def discovered(model_type: str, change: Any = None) -> ModelStructure:
    model = single_model(model_type)
    decoder = decoder_of(model)
    if change is not None:
        change(decoder)
    with torch.no_grad():
        states = model.get_encoder()(input_ids=torch.tensor([[7, 8, 9]]))[0]
    return discover(decoder, {"input_ids": torch.zeros(1, 1, dtype=torch.long), STATES: states})


@pytest.mark.parametrize(
    ("model_type", "name"), [("t5", "EncDecAttention"), ("bart", "encoder_attn"), ("t5gemma", "cross_attn")]
)
def test_cross_attention_is_found_and_is_no_attention_of_the_block(model_type: str, name: str) -> None:
    structure = discovered(model_type)
    for block in structure.blocks:
        cross = block.parts.cross
        assert cross is not None
        names = {module: path for path, module in block.parts.module.named_modules()}
        assert names[cross.module].endswith(name)
        assert cross.module not in block.parts.attention
        assert cross.module not in block.parts.units
        assert len(block.parts.attention) == 1
        assert cross.value_projection is not None
        assert cross.output_projection is not None
    assert structure.uncovered == ()


def test_an_encoder_has_none() -> None:
    assert all(block.parts.cross is None for block in discover(single_model("bart")).blocks)


def test_states_that_share_an_attention_with_the_decoders_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no attention of its own reads them alone"):
        discovered("t5gemma2")


def test_states_that_enter_past_cross_attention_are_refused() -> None:
    """A replay gives the block states of zeros, so what another path makes of them is missing from its output."""

    def leak(decoder: nn.Module) -> None:
        layer = decoder.layers[1]  # type: ignore[index, union-attr]
        own = layer.forward  # type: ignore[union-attr]

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            states = kwargs.get(STATES, args[1] if len(args) > 1 else None)
            return own(hidden_states + states.mean(dim=1, keepdim=True), *args, **kwargs)

        layer.forward = forward  # type: ignore[union-attr, method-assign]

    with pytest.raises(UnsupportedModelError, match="does not give its own output"):
        discovered("bart", leak)


def test_cross_attention_that_is_not_affine_in_the_states_is_refused() -> None:
    class Bent(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    def bend(decoder: nn.Module) -> None:
        cross = decoder.layers[0].encoder_attn  # type: ignore[index, union-attr]
        bent = Bent(cross.v_proj.in_features, cross.v_proj.out_features)  # type: ignore[union-attr, arg-type]
        bent.load_state_dict(cross.v_proj.state_dict())  # type: ignore[union-attr, operator]
        cross.v_proj = bent  # type: ignore[union-attr]

    with pytest.raises(UnsupportedModelError, match="not affine in the encoder's states"):
        discovered("bart", bend)

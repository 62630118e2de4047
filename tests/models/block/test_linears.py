"""What layers apply is found however their class stores it, and refused or probed where it is not their weight."""

from __future__ import annotations

import pytest
import torch
from helpers import far, single_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import applied_axis, bias_of, has_matrix, matrix_of, stored_matrix

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def layers(width: int, out: int, dtype: torch.dtype) -> list[tuple[nn.Module, int]]:
    """(layer, the axis of its inputs), with a bias of the size of the weights: half precision rounds the sum."""
    torch.manual_seed(0)
    made: list[tuple[nn.Module, int]] = [(nn.Linear(width, out), 1), (Conv1D(out, width), 0)]
    for layer, _ in made:
        nn.init.normal_(layer.bias, std=0.02)  # type: ignore[arg-type]
        layer.to(dtype)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "out"), [(6, 4), (5, 5)])
def test_both_ways_to_store_a_matrix_are_told_apart(width: int, out: int, dtype: torch.dtype) -> None:
    for layer, axis in layers(width, out, dtype):
        matrix = layer.weight.mT if axis else layer.weight
        wide = matrix.to(torch.promote_types(dtype, torch.float32))
        assert has_matrix(layer)
        assert applied_axis(layer) == axis
        assert torch.equal(matrix_of(layer, width), wide)
        assert torch.equal(stored_matrix(layer, dtype), wide)
        bias = bias_of(layer, width)
        assert bias is not None
        assert torch.equal(bias, layer.bias.to(bias.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_bias_hides_no_matrix(dtype: torch.dtype) -> None:
    for layer, axis in layers(6, 5, dtype):
        nn.init.constant_(layer.bias, 6e4)  # type: ignore[arg-type]
        matrix = (layer.weight.mT if axis else layer.weight).to(torch.promote_types(dtype, torch.float32))
        before = layer.bias
        assert applied_axis(layer) == axis
        assert torch.equal(stored_matrix(layer, dtype), matrix)
        assert torch.equal(matrix_of(layer, 6), matrix)
        assert layer.bias is before
    doubled = Doubled(6, 4).to(dtype)
    nn.init.constant_(doubled.bias, 3e4)
    with pytest.raises(UnsupportedModelError, match="Doubled's weight is not the matrix"):
        stored_matrix(doubled, dtype)
    assert far(matrix_of(doubled, 6), 2 * doubled.weight.T) <= 1e-6


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_weight_that_is_not_applied_is_refused_or_probed() -> None:
    layer = Doubled(6, 4, bias=False)
    for ask in (lambda: applied_axis(layer), lambda: stored_matrix(layer, torch.float32)):
        with pytest.raises(UnsupportedModelError, match="Doubled's weight is not the matrix"):
            ask()
    assert far(matrix_of(layer, 6), 2 * layer.weight.T) <= 1e-6
    assert bias_of(layer, 6) is None


def test_a_layer_that_does_not_apply_its_weight_is_probed() -> None:
    """LoRA around the layers: what counts is what they do."""
    model = single_model("llama")
    config = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, config).base_model.model.model.layers[0].mlp.down_proj
    expected = wrapped.get_base_layer().weight + wrapped.get_delta_weight("default")
    assert far(matrix_of(wrapped, 48), expected.T) <= 1e-5
    assert bias_of(wrapped, 48) is None

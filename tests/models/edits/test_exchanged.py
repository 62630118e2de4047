"""Parameters with other values, and as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from duat_cli.models.edits.exchanged import exchanged


def test_values_are_there_for_a_while_and_nothing_is_copied() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    before, address, own = layer(x), layer.weight.data_ptr(), layer.weight
    new = torch.full((2, 3), 2.0)
    with exchanged({layer.weight: new}):
        assert layer.weight is own
        assert layer.weight.data_ptr() == new.data_ptr()
        assert torch.equal(layer(x), torch.full((1, 2), 6.0) + layer.bias)
        with exchanged({layer.weight: torch.zeros(2, 3)}):
            assert torch.equal(layer(x)[0], layer.bias)
        assert torch.equal(layer.weight, new)
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer(x), before)


def test_an_error_inside_leaves_no_trace() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.clone()
    with pytest.raises(KeyboardInterrupt), exchanged({layer.weight: torch.zeros(2, 3)}):
        raise KeyboardInterrupt
    assert torch.equal(layer.weight, before)

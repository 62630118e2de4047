"""What accelerate puts around a model's forward is known, and taken from a copy alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from duat_cli.compat.accelerate import without_mixed_precision


class Own(nn.Module):
    """Of which the forward may have been exchanged before."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        if other:
            self.forward: Any = self.twice

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


@pytest.fixture(autouse=True)
def _state_of_its_own() -> Iterator[None]:
    """accelerate keeps one mixed precision a process, which a Trainer of another test sets or would find."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("other", [False, True])
def test_a_copy_computes_in_the_dtype_of_its_weights(other: bool) -> None:
    model, x = Own(other), torch.randn(3, 64)
    plain = model(x)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    mixed = prepared(x)
    assert (mixed - plain).abs().max() > 1e-4
    own = copy.deepcopy(prepared)
    without_mixed_precision(own)
    assert torch.equal(own(x), plain)
    assert torch.equal(prepared(x), mixed)
    without_mixed_precision(own)
    assert torch.equal(own(x), plain)

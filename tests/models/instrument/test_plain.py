"""The untouched pass beside the instrumented one: which tensor of the model's output the two are compared by."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.plain import PlainPass

SIZES, FIRST, SECOND = torch.tensor([4, 4]), torch.ones(2), torch.zeros(3)


def whole_of(output: Any) -> torch.Tensor:
    one = PlainPass([nn.Identity()], lambda: output)
    with one.active():
        one.run()
    return one.outputs.whole


@pytest.mark.parametrize(
    "output",
    [FIRST, (SIZES, FIRST, SECOND), OrderedDict(sizes=SIZES, maps=(FIRST, SECOND)), [{"maps": [(FIRST,)]}, SECOND]],
)
def test_it_is_the_first_of_numbers_however_deep(output: Any) -> None:
    assert whole_of(output) is FIRST


def test_an_output_without_one_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the model's output, tuple, holds no floating-point tensor"):
        whole_of((SIZES, "text"))

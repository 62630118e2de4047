"""Clamps held at what they cut off: exact where they cut, and never in the way where they do not."""

from __future__ import annotations

from typing import Any

import torch
from helpers import single_model
from torch import Tensor

from duat_cli.analysis.support import examine
from duat_cli.models.instrument.attention import Watch
from duat_cli.models.instrument.functions.clamps import ClampFreezer, HeldClamp


class Nobody:
    def captured(self, call: Any) -> None:
        raise AssertionError

    def replacement(self, module: Any, value: Tensor) -> None:
        raise AssertionError


def test_a_held_clamp_cuts_where_it_cut_and_nowhere_else() -> None:
    x = torch.tensor([[0.5, 3.0, -4.0]])
    clamps: list[HeldClamp] = []
    with ClampFreezer(Watch(Nobody()), clamps, held=False):
        assert torch.equal(x.clamp(-1, 1), torch.tensor([[0.5, 1.0, -1.0]]))
        y = x.clone()
        assert y.clamp_(min=-2) is y
    assert len(clamps) == 2
    other = torch.tensor([[9.0, 9.0, 9.0], [0.0, 0.0, 0.0]])
    with ClampFreezer(Watch(Nobody()), clamps, held=True):
        assert torch.equal(other.clamp(-1, 1), torch.tensor([[9.0, 1.0, -1.0], [0.0, 1.0, -1.0]]))
        again = other.clone()
        assert again.clamp_(min=-2) is again
        assert torch.equal(again, torch.tensor([[9.0, 9.0, -2.0], [0.0, 0.0, -2.0]]))


def test_attention_that_really_clips_rebuilds_exactly_and_has_no_operator() -> None:
    model = single_model("dbrx")
    for module in model.modules():
        if hasattr(module, "clip_qkv"):
            module.clip_qkv = 0.5
    entry = examine(model)
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5
    assert entry.status == "partly"
    assert all("clips what it computes" in part for part in entry.parts)

"""A pass whose target alone is of interest does not keep its output."""

from __future__ import annotations

import torch
from torch import nn

from duat_cli.analysis.attribute.seen import Seen
from duat_cli.analysis.attribute.targets import Target
from duat_cli.models.sweep.lockstep import Call

TARGET = Target("token", position=2, token=3, given=True, against=1)


def test_what_is_kept_of_an_output() -> None:
    """The value is that of the logits before they are capped, the row that of the output."""
    torch.manual_seed(0)
    x, layer = torch.randn(1, 4, 6), nn.Linear(6, 5)
    whole, one = (Seen(Call(lambda: layer(x).tanh()), layer, of=target) for target in (None, TARGET))
    for each in (whole, one):
        with each.active():
            each.run()
    logits = layer(x).detach()
    assert torch.equal(whole.output, logits.tanh())
    assert torch.equal(whole.raw, logits)
    assert one.value == float(logits[0, 2, 3].double() - logits[0, 2, 1].double())
    assert torch.equal(one.row, logits[0, 2].tanh())
    assert one._pass.output is None
    assert one._kept == []
    assert one.row.untyped_storage().nbytes() == 5 * 4


def test_an_edit_changes_what_is_read() -> None:
    layer = nn.Identity()
    seen = Seen(Call(lambda: layer(torch.ones(1, 3, 4))), None, (layer, lambda *_: torch.zeros(1, 3, 4)), of=TARGET)
    with seen.active():
        seen.run()
    assert seen.value == 0.0

"""Total and direct parts against forwards written by hand, whose attention, norms and activations are held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attributing import Held, gpt2, llama, report_of
from helpers import far, single_model, token_ids

pytestmark = pytest.mark.usefixtures("in_double")
TOKEN = 77
WRITTEN: dict[str, Callable[..., Held]] = {"llama": llama, "gpt2": gpt2}


@pytest.mark.parametrize("model_type", WRITTEN)
@pytest.mark.parametrize("place", [3, 8])
def test_parts_are_those_of_a_forward_written_by_hand(model_type: str, place: int) -> None:
    model = single_model(model_type).double()
    ids = token_ids(model, tokens=9)
    (got,) = report_of(model, ids, top=10_000, target=f"t{TOKEN}", position=place).attribution
    total, direct = WRITTEN[model_type](model, ids), WRITTEN[model_type](model, ids, cut=True)
    assert far(got.logit, total.logits[place, TOKEN]) < 1e-7
    through, along = (held.parts(held.logits[place, TOKEN]) for held in (total, direct))
    assert far([t.value for t in got.parts.tokens], through.tokens) < 1e-7
    assert far([t.direct for t in got.parts.tokens], along.tokens) < 1e-7
    for block in range(3):
        heads = [head for head in got.direct.heads if head.block == block]
        assert far([head.moved for head in heads], through.heads[block]) < 1e-7
        assert far([head.value for head in heads], along.heads[block]) < 1e-7
        neurons = {n.index: n.value for n in got.parts.neurons if n.block == block}
        expected = through.neurons[block]
        assert len(neurons) == len(expected)
        assert far([neurons[k] for k in range(len(expected))], expected) < 1e-7
    assert sum(unit.value for unit in got.parts.units) == pytest.approx(sum(float(n.sum()) for n in through.neurons))
    static = got.parts.static.value + got.parts.head_bias
    assert static == pytest.approx(sum(float(rest.detach()) for rest in through.rests), abs=1e-7)


@pytest.mark.parametrize("model_type", WRITTEN)
def test_of_a_difference_and_of_a_mean(model_type: str) -> None:
    model = single_model(model_type).double()
    ids = token_ids(model, tokens=5)
    (two,) = report_of(model, ids, target=f"t{TOKEN}", against="t50").attribution
    (mean,) = report_of(model, ids, target=f"t{TOKEN}", against="mean").attribution
    for got, baseline in ((two, lambda row: row[50]), (mean, torch.mean)):
        held = WRITTEN[model_type](model, ids)
        row = held.logits[-1]
        assert far([t.value for t in got.parts.tokens], held.parts(row[TOKEN] - baseline(row)).tokens) < 1e-7


def test_a_unit_at_a_token_by_finite_differences() -> None:
    """The frozen network is affine: half of one FFN's output at one token taken away moves the logit by half its
    part, to the last digit, when everything else is held. Here with later attention and norms held by hand."""
    model = single_model("llama").double()
    ids = token_ids(model, tokens=6)
    (got,) = report_of(model, ids, target=f"t{TOKEN}").attribution
    held = llama(model, ids)
    (gradient,) = torch.autograd.grad(held.logits[-1, TOKEN], held.neurons[1], retain_graph=True)
    unit = got.parts.units[1]
    assert unit.tokens is not None
    assert far(unit.tokens, (gradient * held.neurons[1]).sum(-1)) < 1e-7

"""Whether words of a text with pictures see those behind them, against passes that differ in the last word."""

from __future__ import annotations

import picture_texts
import pytest
from torch import Tensor

from duat_cli.analysis.ahead import Ahead
from duat_cli.models.sweep.lockstep import one_by_one


def ahead(name: str, given: dict[str, Tensor] | Tensor | None = None) -> Ahead:
    model = picture_texts.build(name)
    found = Ahead(model, picture_texts.inputs(name, model) if given is None else given)
    one_by_one(found.passes)
    return found


@pytest.mark.parametrize("name", picture_texts.RUNNING)
def test_words_see_later_ones_in_paligemma_alone(name: str) -> None:
    found = ahead(name)
    assert len(found.passes) == 2
    assert (found.why_no_loss is None) == (name != "paligemma")


def test_nothing_is_run_without_two_different_words() -> None:
    given = picture_texts.inputs("llava", picture_texts.build("llava"))
    ids = given["input_ids"].clone()
    ids[ids != picture_texts.MARK] = 11
    assert not ahead("llava", {**given, "input_ids": ids}).passes
    assert not ahead("llava", given["input_ids"]).passes
    assert not ahead("llava", {"pixel_values": given["pixel_values"]}).passes
    assert ahead("llava", given["input_ids"]).why_no_loss is None

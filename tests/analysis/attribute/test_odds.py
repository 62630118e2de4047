"""Probabilities of targets: of the model's own softmax, and of nothing that is no token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from classifiers import classifier

from duat_cli.analysis.attribute.odds import Odds, odds_of
from duat_cli.analysis.attribute.targets import Target

LOGITS = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, -math.inf, 2.0]]])


def test_a_token_and_the_most_probable_other_one() -> None:
    whole = math.e + math.e**3 + math.e**2
    first = odds_of(None, Target("token", 1, 1, given=False), LOGITS)
    assert first is not None
    assert (first.own, first.rival, first.rivals) == (
        pytest.approx(math.e**3 / whole, rel=1e-12), 3, pytest.approx(math.e**2 / whole, rel=1e-12),
    )  # fmt: skip
    last = odds_of(None, Target("token", 1, 2, given=True), LOGITS)
    assert last is not None
    assert (last.own, last.rival) == (0.0, 1)
    even = odds_of(None, Target("log-probability", 0, 0, given=True), LOGITS)
    assert even is not None
    assert (even.own, even.rivals) == (0.25, 0.25)
    assert even.rival != 0


def test_what_is_held_against_changes_no_probability() -> None:
    plain = Target("token", 1, 0, given=True)
    held = replace(plain, against=1), replace(plain, against_mean=True)
    assert {odds_of(None, one, LOGITS) for one in (plain, *held)} == {odds_of(None, plain, LOGITS)}


def test_components_and_norms_have_none() -> None:
    for kind, token in (("component", 0), ("norm", None)):
        assert odds_of(None, Target(kind, None, token, given=True), LOGITS[0]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "held"),
    [({}, True), ({"num_labels": 2}, False), ({"problem_type": "multi_label_classification"}, False)],
)
def test_classes_have_them_where_one_of_all_holds(fields: dict[str, Any], held: bool) -> None:
    """Of an output of three entries: not where the config names another number, or lets labels hold together."""
    model, target = classifier("text", **fields), Target("class", None, 1, given=True)
    odds = odds_of(model, target, torch.tensor([[1.0, 3.0, 2.0]]))
    whole = math.e + math.e**3 + math.e**2
    assert odds == (Odds(pytest.approx(math.e**3 / whole), 2, pytest.approx(math.e**2 / whole)) if held else None)

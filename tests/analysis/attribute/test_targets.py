"""What is asked for, every way in which it cannot be had, and how probable it is."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attributing import WORDS
from classifiers import classifier

from duat_cli.analysis.attribute.targets import Asked, Chooser, Odds, Target, odds_of
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.words import Labels

IDS = [40, 41, 42, 43]
LOGITS = torch.randn(1, 4, 90, generator=torch.Generator().manual_seed(0))


def chosen(output: torch.Tensor = LOGITS, *, headless: bool = False, **asked: object) -> list[Target]:
    return Chooser(Asked(**asked), WORDS, Labels(SimpleNamespace(id2label={0: "no", 1: "yes"}))).of(
        0, IDS, output, "the prompt", headless=headless
    )  # type: ignore[arg-type]


def test_without_a_target_it_is_the_first_choice() -> None:
    (one,) = chosen()
    assert (one.position, one.token, one.given) == (3, int(LOGITS[0, 3].argmax()), False)
    assert one.rank(LOGITS) == 1


def test_without_a_position_it_is_the_mask_or_the_last_token() -> None:
    chooser = Chooser(Asked(), WORDS, Labels(None))
    (one,) = chooser.of(0, [40, 89, 42, 43], LOGITS, "the prompt", headless=False)
    assert one.position == 1
    assert chosen()[0].position == 3
    (last,) = Chooser(Asked(position=-1), WORDS, Labels(None)).of(
        0, [40, 89, 42, 43], LOGITS, "the prompt", headless=False
    )
    assert last.position == 3


def test_a_value_is_less_another_or_the_mean() -> None:
    (one,) = chosen(target="t50", position=-4)
    assert float(one.of(LOGITS)) == float(LOGITS[0, 0, 50].double())
    (two,) = chosen(target="t50", against="t60", position=1)
    assert float(two.of(LOGITS)) == pytest.approx(float(LOGITS[0, 1, 50] - LOGITS[0, 1, 60]), rel=1e-6)
    (mean,) = chosen(target="t50", against="mean")
    assert float(mean.of(LOGITS)) == pytest.approx(float(LOGITS[0, 3, 50] - LOGITS[0, 3].mean()), rel=1e-5)


def test_all_positions_are_of_the_token_that_follows() -> None:
    found = chosen(position="all")
    assert [one.token for one in found[:-1]] == IDS[1:]
    assert found[-1].token == int(LOGITS[0, 3].argmax())
    assert {one.token for one in chosen(position="all", target="t50")} == {50}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"target": "t50 t51"},
            r"--target 't50 t51': 2 tokens, 't50 ' \(#50\), 't51 ' \(#51\); expected one: .* --first-token",
        ),
        ({"target": "word"}, "--target 'word': not in the vocabulary"),
        ({"target": " "}, "--target ' ': not in the vocabulary"),
        ({"target": "t95"}, "--target 't95': token 95 is none of the 90"),
        ({"target": "t50", "against": "t50"}, "--against 't50': that is the target itself$"),
        (
            {"position": "all", "against": "t42"},
            "--against 't42': .* itself, which the text has in the prompt, position 1; name another with --target",
        ),
        ({"position": 4}, "--position 4: the prompt has 4 tokens; expected -4 to 3"),
        ({"position": -5}, "--position -5: the prompt has 4 tokens"),
    ],
)
def test_what_cannot_be_had(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen(**asked)


def test_a_reference_that_is_the_models_choice() -> None:
    choice = WORDS.text(int(LOGITS[0, 3].argmax()))
    with pytest.raises(InputError, match="which the model chose in the prompt, position 3; name another with --target"):
        chosen(against=choice)


def test_one_output_has_no_mean_to_differ_from() -> None:
    with pytest.raises(InputError, match="--against mean: this model has one output, which is its own mean"):
        chosen(torch.ones(1, 1), against="mean")


def test_of_a_masked_model_every_position_is_of_its_own_token() -> None:
    chooser = Chooser(Asked(position="all"), WORDS, Labels(None))
    chooser.masked = True
    assert [one.token for one in chooser.of(0, IDS, LOGITS, "the prompt", headless=False)] == IDS


def test_the_first_of_several_tokens_if_asked_for() -> None:
    assert chosen(target="t50 t51", first_token=True)[0].token == 50


def test_a_class_by_name_or_number() -> None:
    output = torch.tensor([[0.5, 2.0]])
    assert chosen(output, target="yes")[0].token == chosen(output, target="1")[0].token == chosen(output)[0].token == 1
    with pytest.raises(InputError, match="'2': no class of this model; it has no, yes"):
        chosen(output, target="2")


def test_a_norm_is_along_the_vectors_own_direction() -> None:
    output = torch.tensor([[3.0, 4.0]])
    (norm,) = chosen(output, target="norm", headless=True)
    assert float(norm.of(output)) == 5.0
    assert float(norm.of(2 * output + torch.tensor([4.0, -3.0]))) == pytest.approx(10.0)
    with pytest.raises(InputError, match="--against"):
        chosen(output, target="norm", against="1", headless=True)


def test_an_output_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(1, 3, 90\)"):
        chosen(LOGITS[:, :3])


# -- probabilities: of the model's own softmax, and of nothing that is no token -----------------------------------

UNEVEN = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, -math.inf, 2.0]]])


def test_a_token_and_the_most_probable_other_one() -> None:
    whole = math.e + math.e**3 + math.e**2
    first = odds_of(None, Target("token", 1, 1, given=False), UNEVEN)
    assert first is not None
    assert (first.own, first.rival, first.rivals) == (
        pytest.approx(math.e**3 / whole, rel=1e-12), 3, pytest.approx(math.e**2 / whole, rel=1e-12),
    )  # fmt: skip
    last = odds_of(None, Target("token", 1, 2, given=True), UNEVEN)
    assert last is not None
    assert (last.own, last.rival) == (0.0, 1)
    even = odds_of(None, Target("log-probability", 0, 0, given=True), UNEVEN)
    assert even is not None
    assert (even.own, even.rivals) == (0.25, 0.25)
    assert even.rival != 0


def test_what_is_held_against_changes_no_probability() -> None:
    plain = Target("token", 1, 0, given=True)
    held = replace(plain, against=1), replace(plain, against_mean=True)
    assert {odds_of(None, one, UNEVEN) for one in (plain, *held)} == {odds_of(None, plain, UNEVEN)}


def test_components_and_norms_have_none() -> None:
    for kind, token in (("component", 0), ("norm", None)):
        assert odds_of(None, Target(kind, None, token, given=True), UNEVEN[0]) is None  # type: ignore[arg-type]


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

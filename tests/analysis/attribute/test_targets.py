"""What is asked for, and every way in which it cannot be had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attributing import WORDS

from duat_cli.analysis.attribute.targets import Asked, Chooser, Target
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

"""What is asked for, and every way in which it cannot be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attributing import WORDS
from tokenizing import byte_level, sentencepiece, with_end, word_pieces

from duat_cli.analysis.attribute.targets import Asked, Chooser, Target, Words
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.prompts import Prompt, encode
from duat_cli.loading.texts import PromptText, asked

IDS = [40, 41, 42, 43]
LOGITS = torch.randn(1, 4, 90, generator=torch.Generator().manual_seed(0))


def chosen(output: torch.Tensor = LOGITS, *, headless: bool = False, **asked: object) -> list[Target]:
    return Chooser(Asked(**asked), WORDS, {0: "no", 1: "yes"}).of(0, IDS, output, "the prompt", headless=headless)  # type: ignore[arg-type]


def test_without_a_target_it_is_the_first_choice() -> None:
    (one,) = chosen()
    assert (one.position, one.token, one.given) == (3, int(LOGITS[0, 3].argmax()), False)
    assert one.rank(LOGITS) == 1


def test_without_a_position_it_is_the_mask_or_the_last_token() -> None:
    chooser = Chooser(Asked(), WORDS, {})
    (one,) = chooser.of(0, [40, 89, 42, 43], LOGITS, "the prompt", headless=False)
    assert one.position == 1
    assert chosen()[0].position == 3
    (last,) = Chooser(Asked(position=-1), WORDS, {}).of(0, [40, 89, 42, 43], LOGITS, "the prompt", headless=False)
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
    chooser = Chooser(Asked(position="all"), WORDS, {})
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


def test_a_token_is_found_by_its_text_its_piece_or_its_id() -> None:
    words, pieces = Words(sentencepiece()), sentencepiece().get_vocab()
    for text, piece in {
        " cat": "▁cat", "▁cat": "▁cat", "at": "at", "the": "▁the", "<0xC3>": "<0xC3>", "<s>": "<s>", " ": "▁",
    }.items():  # fmt: skip
        assert words.token("--target", text, first=False) == pieces[piece]
    assert words.token("--target", f"#{pieces['cat']}", first=False) == pieces["cat"]
    for text, said in {
        "cat": rf"may be ' cat' \(#{pieces['▁cat']}\), 'cat' \(#{pieces['cat']}\); give one by its id",
        "é": r"3 tokens, ' ' \(#\d+\), '<0xC3>' \(#\d+\), '<0xA9>' \(#\d+\); expected one: give one by its id",
    }.items():
        with pytest.raises(InputError, match=said):
            words.token("--target", text, first=False)
    bert = Words(word_pieces())
    assert bert.token("--target", "##s", first=False) == word_pieces().get_vocab()["##s"]
    with pytest.raises(InputError, match=r"--target 'cats': 2 tokens, 'cat' \(#6\), '##s' \(#7\); expected one"):
        bert.token("--target", "cats", first=False)
    assert bert.token("--target", "#7", first=False) == 7


def prompt_of(tokenizer: Any, text: str, cut: int | None = None) -> Prompt:
    [made] = encode(tokenizer, [PromptText(text, "here", 1)], cut, None, 1 << 20)
    return made


@pytest.mark.parametrize("make", [sentencepiece, byte_level, lambda: with_end(sentencepiece())])
@pytest.mark.parametrize(("first", "second"), [("the cat", " the cat"), ("the", " cat"), ("t", "\nthe")])
def test_a_text_behind_a_prompt_is_read_with_it(make: Any, first: str, second: str) -> None:
    tokenizer = make()
    front, behind = Words(tokenizer).behind(prompt_of(tokenizer, first), "prompt 1", second)
    together = [token for token in tokenizer(first + second)["input_ids"] if token != tokenizer.eos_token_id]
    assert [*front, *behind] == together
    assert front == [t for t in tokenizer(first)["input_ids"] if t != tokenizer.eos_token_id]
    assert behind


def test_a_text_that_joins_the_prompt_s_end_is_refused() -> None:
    for make in (sentencepiece, lambda: with_end(sentencepiece())):
        tokenizer = make()
        with pytest.raises(InputError, match=r"--continuation 't': behind prompt 3 it is no token .* read as ' cat'"):
            Words(tokenizer).behind(prompt_of(tokenizer, "the ca"), "prompt 3", "t")


def test_of_a_prompt_that_is_cut_or_of_token_ids() -> None:
    tokenizer = sentencepiece()
    pieces = tokenizer.get_vocab()
    front, behind = Words(tokenizer).behind(prompt_of(tokenizer, "the cat the", 2), "prompt 1", " cat")
    assert tokenizer.convert_ids_to_tokens([*front, *behind]) == ["▁the", "▁cat", "▁cat"]
    ids = (pieces["cat"], pieces["at"])
    [given] = encode(tokenizer, [PromptText("#5 #6", "here", 1, ids)], None, None, 1 << 20)
    front, behind = Words(tokenizer).behind(given, "prompt 1", "the")
    assert (front, behind) == ([*ids], [pieces["▁the"]])
    assert Words(None).behind(given, "prompt 1", "#5 #7") == ([*ids], [5, 7])


def test_a_conversation_is_continued_as_its_template_wrote_it() -> None:
    tokenizer = with_end(sentencepiece())
    tokenizer.chat_template = "{{ messages[0].content }}</s>"
    [prompt] = encode(tokenizer, [asked(PromptText("the cat", "here", 1))], None, None, 1 << 20)
    front, behind = Words(tokenizer).behind(prompt, "prompt 1", " the")
    assert tokenizer.convert_ids_to_tokens(front) == ["▁the", "▁cat", "</s>"]
    assert behind == tokenizer("the cat</s> the", add_special_tokens=False)["input_ids"][3:]

"""Which token a text is, and how it is read behind a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizing import byte_level, sentencepiece, with_end, word_pieces

from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt, encode
from duat_cli.loading.texts import PromptText, asked
from duat_cli.loading.words import Labels, Words


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


def test_classes_have_names_or_numbers() -> None:
    labels = Labels(SimpleNamespace(id2label={0: "no", "1": "yes", 2: "7"}))
    assert [labels.text(k) for k in range(4)] == ["no", "yes", "7", "3"]
    assert [labels.token("--target", text) for text in ("yes", "7", "0")] == [1, 2, 0]
    with pytest.raises(InputError, match="--target '3': no class of this model; it has no, yes, 7"):
        labels.token("--target", "3")
    assert labels.token("--target", "3", 4) == 3
    with pytest.raises(InputError, match="--target 'yes': no class of this model; it has no"):
        labels.token("--target", "yes", 1)
    assert Labels(None).token("--target", "2", 3) == 2
    for text in ("9" * 5000, "٣"):
        with pytest.raises(InputError, match=r"no class of this model; it has 0, 1, 2, 3, 4, 5, 6, 7 and 2 more$"):
            Labels(None).token("--target", text, 10)
    twice = Labels(SimpleNamespace(id2label={0: "so", 1: "so", 2: "x"}))
    with pytest.raises(InputError, match="--target 'so': classes 0, 1 are called so; give one by its number"):
        twice.token("--target", "so")
    assert twice.token("--target", "1") == 1

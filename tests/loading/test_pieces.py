"""No two tokens of a vocabulary say the same, and what one says finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizing import byte_level, sentencepiece, word_pieces

from duat_cli.loading.pieces import byte_count, piece_text, pieces_that_say


def saying(tokenizer: Any, text: str) -> list[int]:
    return pieces_that_say(tokenizer, tokenizer.get_vocab(), text)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, word_pieces])
def test_every_token_says_something_of_its_own_and_is_found_by_it(make: Any) -> None:
    tokenizer = make()
    said = {token: piece_text(tokenizer, token) for token in tokenizer.get_vocab().values()}
    assert len(set(said.values())) == len(said)
    assert "\ufffd" not in "".join(said.values())
    for token, text in [*said.items()][::5]:
        assert token in saying(tokenizer, text) or "\\x" in text or text.startswith("<0x")


def test_what_decoding_alone_loses() -> None:
    bytes_alone = byte_level()
    pieces = [piece_text(bytes_alone, token) for token in bytes_alone("漢é x", add_special_tokens=False)["input_ids"]]
    assert [text.encode().decode("unicode_escape").encode("latin-1") for text in pieces[:3]] == [
        b"\xe6",
        b"\xbc",
        b"\xa2",
    ]
    words = sentencepiece()
    assert [piece_text(words, token) for token in words("the cat")["input_ids"]] == [" the", " cat"]
    ids = words.convert_tokens_to_ids(["cat", "▁", "<0xC3>", "<0x74>", "<0x0A>"])
    assert [piece_text(words, token) for token in ids] == ["cat", " ", "<0xC3>", "<0x74>", "\n"]
    assert words.convert_ids_to_tokens(saying(words, "\n")) == ["<0x0A>"]


def test_a_tokenizer_that_only_decodes() -> None:
    assert piece_text(SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"), 7) == "<7>"


def test_several_pieces_may_be_meant() -> None:
    words = sentencepiece()
    assert words.convert_ids_to_tokens(saying(words, " cat")) == ["▁cat"]
    assert words.convert_ids_to_tokens(saying(words, "cat")) == ["cat"]
    assert words.convert_ids_to_tokens(saying(words, "▁cat")) == ["▁cat"]
    assert saying(words, "dog") == []
    assert word_pieces().convert_ids_to_tokens(saying(word_pieces(), "##s")) == ["##s"]


def test_what_writes_a_byte_does_not_say_it() -> None:
    """Byte-level BPE writes the byte 0xE9 as the letter that has this number, 'é'."""
    tokenizer = byte_level()
    assert tokenizer.get_vocab()["é"]
    assert saying(tokenizer, "é") == []
    assert tokenizer.convert_ids_to_tokens(saying(tokenizer, "Ġthe")) == ["Ġthe"]
    assert saying(tokenizer, "Ġthe") == saying(tokenizer, " the")


def test_how_many_bytes_a_token_stands_for() -> None:
    bytes_alone, words = byte_level(), sentencepiece()
    ids = bytes_alone("漢é x", add_special_tokens=False)["input_ids"]
    assert sum(byte_count(bytes_alone, token) or 0 for token in ids) == len("漢é x".encode())
    assert [byte_count(words, token) for token in words.convert_tokens_to_ids(["<0xC3>", "▁"])] == [1, None]
    assert byte_count(SimpleNamespace(), 0) is None

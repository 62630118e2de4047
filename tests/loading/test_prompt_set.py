"""Sets of prompts that are read again and again: their keys, and a file that changes meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from duat_cli.errors import InputError
from duat_cli.loading import prompt_set as module
from duat_cli.loading.prompt_set import PromptSet, digest_of, key_of, keys_of
from duat_cli.loading.prompts import Prompt, open_prompts
from duat_cli.loading.texts import PromptText


def encoded(texts: Sequence[PromptText]) -> Any:
    return [Prompt(text.text, "", None, text.line) for text in texts]  # type: ignore[arg-type]


def test_a_key_is_the_beginning_of_the_hash() -> None:
    texts = [PromptText("é", "--prompt 1", 1), PromptText("b", "--prompt 2", 2)]
    keys = keys_of(texts)
    assert keys[0] == key_of(hashlib.sha256("é".encode()).hexdigest())
    assert keys[1].to_bytes(8, "big") == hashlib.sha256(b"b").digest()[:8]
    assert len({digest_of(keys), digest_of(keys[::-1]), digest_of(keys[:1])}) == 3


def test_token_ids_and_a_text_that_is_written_like_them_have_keys_of_their_own() -> None:
    keys = keys_of([PromptText("#5 #6", "line 1", 1, (5, 6)), PromptText("#5 #6", "line 2", 2)])
    assert keys[0] != keys[1]


def test_only_wanted_prompts_become_tokens(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("zero\none\ntwo\none\n")
    texts = open_prompts([], str(file), None)
    asked: list[str] = []

    def encode(some: Sequence[PromptText]) -> Any:
        asked.extend(text.text for text in some)
        return encoded(some)

    prompts = PromptSet(texts, keys_of(texts), encode)
    for _ in range(2):
        assert [(k, p.text) for k, p in prompts.prompts(lambda k: k % 2 == 1)] == [(1, "one"), (3, "one")]
    assert asked == ["one"] * 4


def test_some_become_tokens_together_and_few_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [PromptText("abcdef" if k == 70 else "a", f"line {k}", k) for k in range(150)]
    sizes: list[int] = []
    read: list[int] = []

    class Read:
        def __iter__(self) -> Iterator[PromptText]:
            for number, text in enumerate(texts):
                read.append(number)
                yield text

    def encode(some: Sequence[PromptText]) -> Any:
        sizes.append(len(some))
        return encoded(some)

    prompts = PromptSet(Read(), keys_of(texts), encode)
    assert [k for k, _ in prompts.prompts(lambda k: True)] == list(range(150))
    assert sizes == [64, 64, 22]
    assert [k for k, _ in prompts.prompts(lambda k: k % 50 == 1)] == [1, 51, 101]
    assert sizes[3:] == [2, 1]
    monkeypatch.setattr(module, "CHARACTERS", 6)
    read.clear()
    assert next(prompts.prompts(lambda k: k >= 70))[0] == 70
    assert (sizes[5:], read[-1]) == ([1], 70)
    read.clear()
    assert next(prompts.prompts(lambda k: k == 0))[0] == 0
    assert read[-1] == 63


@pytest.mark.parametrize(
    ("later", "said"),
    [("zero\nONE\n", "line 2: changed while"), ("zero\n", "became fewer"), ("zero\none\ntwo\n", "line 3: changed")],
)
def test_a_file_that_changes_is_refused(tmp_path: Path, later: str, said: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("zero\none\n")
    texts = open_prompts([], str(file), None)
    prompts = PromptSet(texts, keys_of(texts), encoded)
    file.write_text(later)
    with pytest.raises(InputError, match=said):
        list(prompts.prompts(lambda k: True))

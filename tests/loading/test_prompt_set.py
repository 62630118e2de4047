"""Sets of prompts that are read again and again: their keys, and a file that changes meanwhile."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from duat_cli.errors import InputError
from duat_cli.loading.prompt_set import PromptSet, digest_of, key_of, keys_of
from duat_cli.loading.prompts import Prompt, open_prompts
from duat_cli.loading.texts import PromptText


def encoded(text: PromptText) -> Any:
    return Prompt(text.text, "", None, text.line)  # type: ignore[arg-type]


def test_a_key_is_the_beginning_of_the_hash() -> None:
    texts = [PromptText("é", "--prompt 1", 1), PromptText("b", "--prompt 2", 2)]
    keys = keys_of(texts)
    assert keys[0] == key_of(hashlib.sha256("é".encode()).hexdigest())
    assert keys[1].to_bytes(8, "big") == hashlib.sha256(b"b").digest()[:8]
    assert len({digest_of(keys), digest_of(keys[::-1]), digest_of(keys[:1])}) == 3


def test_only_wanted_prompts_become_tokens(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("zero\none\ntwo\none\n")
    texts = open_prompts([], str(file), None)
    asked: list[str] = []

    def encode(text: PromptText) -> Any:
        asked.append(text.text)
        return encoded(text)

    prompts = PromptSet(texts, keys_of(texts), encode)
    for _ in range(2):
        assert [(k, p.text) for k, p in prompts.prompts(lambda k: k % 2 == 1)] == [(1, "one"), (3, "one")]
    assert asked == ["one"] * 4


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

"""Number of tokens of prompts, found before the model is loaded: with tokenizer.json alone, or through transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.chat import written
from duat_cli.loading.quiet import calling_tokenizer

if TYPE_CHECKING:
    from duat_cli.loading.prompts import PromptText


def token_counter(
    path: Path, most: int | None, *, trust_remote_code: bool = False, template: Path | None = None
) -> Callable[[Sequence[PromptText]], list[int]]:
    """A function that counts the tokens of each text with the tokenizer of a checkpoint folder: special ones included,
    at most `most`.

    The tokenizer is read once, with the first text. tokenizer.json is read without transformers if it is there and no
    conversation has to be written out. template: the folder whose chat template stands in for one that is missing.
    CheckpointError where there is no tokenizer.
    """
    by_file = functools.cache(lambda: _by_file(path / "tokenizer.json"))
    by_transformers = functools.cache(lambda: _by_transformers(path, trust_remote_code, template))

    def counts(texts: Sequence[PromptText]) -> list[int]:
        found = []
        for text in texts:
            if text.ids is not None:
                found.append(len(text.ids[:most]))
                continue
            count = (None if text.conversation else by_file()) or by_transformers()
            with calling_tokenizer(f"{text.where}: the tokenizer fails", InputError):
                number = count(text)
            found.append(number if most is None else min(number, most))
        return found

    return counts


def _by_file(path: Path) -> Callable[[PromptText], int] | None:
    """A counter that reads tokenizer.json; None where the file is missing or cannot be read, so that transformers then
    says what is wrong with it."""
    if not path.is_file():
        return None
    try:
        with calling_tokenizer(str(path)):
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
    except CheckpointError:
        return None
    return lambda text: len(tokenizer.encode(text.text).ids)


def _by_transformers(path: Path, trust_remote_code: bool, template: Path | None) -> Callable[[PromptText], int]:
    from duat_cli.loading.model.tokenizer import templated_tokenizer

    tokenizer = templated_tokenizer(path, template, trust_remote_code=trust_remote_code)

    def count(text: PromptText) -> int:
        made = tokenizer(written(tokenizer, text), verbose=False, add_special_tokens=not text.conversation)
        return len(made["input_ids"])

    return count

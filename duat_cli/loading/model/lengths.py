"""How many tokens prompts have, asked before the model is loaded: by the tokenizer's own file, or by transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.quiet import calling_tokenizer

if TYPE_CHECKING:
    from duat_cli.loading.prompts import PromptText


def token_counter(
    path: Path, most: int | None, *, trust_remote_code: bool = False
) -> Callable[[Sequence[PromptText]], list[int]]:
    """What gives the tokens of each text under the tokenizer of a checkpoint folder, special ones included, at most
    `most`.

    The tokenizer is read once, with the first text: tokenizer.json without transformers, where it is there.
    CheckpointError where there is no tokenizer.
    """
    read = functools.cache(lambda: _by_file(path / "tokenizer.json") or _by_transformers(path, trust_remote_code))

    def counts(texts: Sequence[PromptText]) -> list[int]:
        found = []
        for text in texts:
            if text.ids is not None:
                found.append(len(text.ids[:most]))
                continue
            count = read()
            with calling_tokenizer(f"{text.where}: the tokenizer fails", InputError):
                number = count(text.text)
            found.append(number if most is None else min(number, most))
        return found

    return counts


def _by_file(path: Path) -> Callable[[str], int] | None:
    """None where there is no such file, or none that can be read: transformers then says what is wrong with it."""
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
    return lambda text: len(tokenizer.encode(text).ids)


def _by_transformers(path: Path, trust_remote_code: bool) -> Callable[[str], int]:
    from duat_cli.loading.model.load import load_tokenizer

    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return lambda text: len(tokenizer(text, verbose=False)["input_ids"])

"""What tokens say, for the commands that show or write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from duat_cli.errors import InputError

if TYPE_CHECKING:
    from duat_cli.loading.model.load import LoadedModel


def token_texts(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[int], str]:
    """What a token says; it may be part of a character."""
    from duat_cli.loading.model.load import load_tokenizer

    if loaded.like is not None and "input_ids" not in loaded.like:  # positions of a picture or a sound say nothing
        return lambda position: f"#{position}"
    texts = texts_of(load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code))
    return lambda token: texts([token])


def texts_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """What tokens that follow each other say."""
    from duat_cli.loading.quiet import calling_tokenizer

    def text(tokens: list[int]) -> str:
        with calling_tokenizer("--prompt: the tokenizer fails", InputError):
            return str(tokenizer.decode(tokens))

    return text

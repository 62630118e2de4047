"""What tokens say, for the commands that show or write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duat_cli.loading.model.load import LoadedModel


def token_texts(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[int], str]:
    """What a token says; it may be part of a character."""
    from duat_cli.loading.model.load import load_tokenizer
    from duat_cli.loading.prompts import said

    if not loaded.reads_tokens:
        return lambda position: f"#{position}"
    tokenizer = load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code)
    return lambda token: said(tokenizer, [token], "--prompt: ")

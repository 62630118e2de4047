"""The file that --matrices and `duat matrix -o` write: W' by its factors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from duat_cli.api import tensors
from duat_cli.cli.terminal.output import Target
from duat_cli.errors import InputError

if TYPE_CHECKING:
    from duat_cli.analysis.operator_file import OperatorFile
    from duat_cli.loading.model.load import LoadedModel


def tensor_target(option: str, name: str | None) -> Target | None:
    """The file of an option's value, checked; None without one."""
    return tensors.tensor_target(Target, option, name)


@contextlib.contextmanager
def operator_file(target: Target | None, loaded: LoadedModel, trust_remote_code: bool) -> Iterator[OperatorFile | None]:
    """The file to fill; it takes its name when the block is left without an error."""
    if target is None:
        yield None
        return
    with tensors.operator_file(target, token_texts(loaded, trust_remote_code)) as file:
        yield file


def token_texts(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[int], str]:
    """What a token says; it may be part of a character."""
    texts = texts_of_tokens(loaded, trust_remote_code)
    return lambda token: texts([token])


def texts_of_tokens(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[list[int]], str]:
    """What tokens that follow each other say."""
    from duat_cli.loading.model.load import load_tokenizer
    from duat_cli.loading.quiet import calling_tokenizer

    if loaded.like is not None and "input_ids" not in loaded.like:  # positions of a picture or a sound say nothing
        return lambda positions: " ".join(f"#{position}" for position in positions)
    tokenizer = load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code)

    def text(tokens: list[int]) -> str:
        with calling_tokenizer("--prompt: the tokenizer fails", InputError):
            return str(tokenizer.decode(tokens))

    return text


def special_tokens(loaded: LoadedModel, trust_remote_code: bool) -> frozenset[int]:
    """Ids of tokens that are no text."""
    from duat_cli.loading.model.load import load_tokenizer

    return frozenset(load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code).all_special_ids)

"""A set of prompts of any size: read anew in each pass, made tokens one by one, known by the hashes of its texts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import PromptText


def key_of(sha256: str) -> int:
    """The leading 64 bits of a text's hash: what decides who runs it."""
    return int(sha256[:16], 16)


def keys_of(texts: Iterable[PromptText]) -> array[int]:
    """The key of every text, in order, 8 bytes each; a text that cannot be read is met here."""
    return array("Q", (key_of(hashlib.sha256(t.text.encode()).hexdigest()) for t in texts))


def digest_of(keys: array[int]) -> str:
    """A hash of the texts and their order."""
    return hashlib.sha256(keys.tobytes()).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """Texts, their keys, and how one becomes token ids."""

    texts: Iterable[PromptText]
    keys: array[int]
    encode: Callable[[PromptText], Prompt]

    def prompts(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Prompt]]:
        """Those at the wanted positions, in order; InputError where the texts are no longer those of the keys."""
        position = -1
        for position, text in enumerate(self.texts):
            key = key_of(hashlib.sha256(text.text.encode()).hexdigest())
            if position >= len(self.keys) or key != self.keys[position]:
                raise InputError(f"{text.where}: changed while it was read; run again")
            if wanted(position):
                yield position, self.encode(text)
        if position + 1 < len(self.keys):
            raise InputError("the prompts became fewer while they were read; run again")

"""A set of prompts of any size: read anew in each pass, encoded in small batches, and identified by the hashes of its
texts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import PromptText

AT_ONCE, CHARACTERS = 64, 1 << 16  # most texts and characters encoded together; a tokenizer's call has a fixed cost


def key_of(sha256: str) -> int:
    """The leading 64 bits of a text's hash, which decide the process that runs it."""
    return int(sha256[:16], 16)


def keys_of(texts: Iterable[PromptText]) -> array[int]:
    """The key of every text, in order, 8 bytes each. Raises the error of a text that cannot be read."""
    return array("Q", (key_of(text.sha256) for text in texts))


def digest_of(keys: array[int]) -> str:
    """A hash of the texts and their order."""
    return hashlib.sha256(keys.tobytes()).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """Texts, their keys, and a function that encodes some as token ids."""

    texts: Iterable[PromptText]
    keys: array[int]
    encode: Callable[[Sequence[PromptText]], Sequence[Prompt]]
    template: str = ""
    """The chat template, where it is not among the files of the checkpoint's tokenizer."""

    def prompts(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Prompt]]:
        """The prompts at the wanted positions, in order; InputError where the texts no longer match the keys."""
        position, size = -1, 0
        waiting: list[tuple[int, PromptText]] = []
        for position, text in enumerate(self.texts):
            key = key_of(text.sha256)
            if position >= len(self.keys) or key != self.keys[position]:
                raise InputError(f"{text.where}: changed while it was read; run again")
            if wanted(position):
                waiting.append((position, text))
                size += len(text.text)
            if waiting and (position >= waiting[0][0] + AT_ONCE - 1 or size >= CHARACTERS):
                yield from self._encoded(waiting)
                waiting, size = [], 0
        yield from self._encoded(waiting)
        if position + 1 < len(self.keys):
            raise InputError("the prompts became fewer while they were read; run again")

    def _encoded(self, texts: Sequence[tuple[int, PromptText]]) -> Iterator[tuple[int, Prompt]]:
        prompts = self.encode([text for _, text in texts]) if texts else ()
        return zip((position for position, _ in texts), prompts, strict=True)

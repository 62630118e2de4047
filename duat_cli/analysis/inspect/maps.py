"""C, token by token, of the first prompts for pages; --matrices has it in full precision and for all prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import BlockMap, CouplingMap

MOST_TOKENS = 64  # of a prompt: a larger map is unreadable, and takes tokens^2 numbers per block
DIGITS = 4


class Maps:
    """The maps, which a run fills."""

    def __init__(self, prompts: Sequence[Prompt], text: Callable[[int], str]) -> None:
        """prompts: those to map, the first of the report. text: gives the text of a token id."""
        self._prompts, self._text = prompts, text
        self._found: dict[int, list[BlockMap]] = {number: [] for number in range(len(prompts))}
        self._lengths: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many prompts are mapped."""
        return len(self._prompts)

    def wants(self, prompt: int) -> bool:
        return prompt in self._found

    def add(self, prompt: int, block: int, C: Tensor) -> None:
        """Adds C, (N, N), of one block under one prompt, cut to MOST_TOKENS rows and columns."""
        self._lengths[prompt] = len(C)
        rows = [_row(row) for row in C[:MOST_TOKENS, :MOST_TOKENS].double().tolist()]
        self._found[prompt].append(BlockMap(index=block, coupling=rows))

    def maps(self) -> list[CouplingMap]:
        """The finished maps of all prompts."""
        return [self._map(number, prompt) for number, prompt in enumerate(self._prompts)]

    def _map(self, number: int, prompt: Prompt) -> CouplingMap:
        ids = prompt.input_ids[0].tolist()
        length = self._lengths.get(number, len(ids))
        if length == len(ids):
            texts = [self._text(token) for token in ids[:MOST_TOKENS]]
        else:  # the blocks read other vectors than the prompt's tokens
            texts = [f"vector {place}" for place in range(min(length, MOST_TOKENS))]
        return CouplingMap(prompt=number, total_tokens=length, tokens=texts, blocks=self._found[number])


def _row(values: list[float]) -> list[float]:
    """The values to four digits, without trailing zeros."""
    kept = [float(f"{value:.{DIGITS}g}") for value in values]
    while kept and kept[-1] == 0:
        kept.pop()
    return kept

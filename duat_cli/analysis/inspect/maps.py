"""C token by token of the first prompts, for reports that are looked at; whole, and of all prompts, in --matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import BlockMap, CouplingMap

MOST_TOKENS = 64  # of a prompt: a map of more is no picture, and takes tokens^2 numbers a block
DIGITS = 4


class Maps:
    """The maps while a run fills them."""

    def __init__(self, prompts: Sequence[Prompt], text: Callable[[int], str]) -> None:
        """prompts: those to map, the report's first. text: what a token says."""
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
        """C (N, N) of one block under one prompt. Rows do not depend on the tokens behind them that are cut."""
        self._lengths[prompt] = len(C)
        rows = [_row(row) for row in C[:MOST_TOKENS, :MOST_TOKENS].double().tolist()]
        self._found[prompt].append(BlockMap(index=block, coupling=rows))

    def maps(self) -> list[CouplingMap]:
        """All of them."""
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
    """Four digits of each, without the zeros at the end."""
    kept = [float(f"{value:.{DIGITS}g}") for value in values]
    while kept and kept[-1] == 0:
        kept.pop()
    return kept

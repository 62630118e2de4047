"""How far the work on prompts is: the same number of steps for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duat_cli.analysis.progress import Progress

PASSES = 3  # steps of a prompt beside its ablations: its responses, and its readings, which count twice


@dataclass(frozen=True)
class Steps:
    """Says on the way what is done under which prompts. numbers: of prompts that go side by side."""

    progress: Progress
    prompts: int
    ablated: int
    """Terms that are ablated under each."""

    def responding(self, numbers: Sequence[int], terms: int) -> None:
        """The responses of so many terms come next."""
        self._say(numbers, 0, f"responses of {terms} terms")

    def reading(self, numbers: Sequence[int]) -> None:
        """Exact readings come next."""
        self._say(numbers, 1, "exact readings")

    def ablating(self, numbers: Sequence[int]) -> Callable[[], None]:
        """To be called after each ablation."""
        steps = itertools.count(PASSES + 1)
        return lambda: self._say(numbers, next(steps), "ablating terms")

    def _say(self, numbers: Sequence[int], step: int, what: str) -> None:
        each, side_by_side = PASSES + self.ablated, len(numbers) > 1
        where = f"{self.prompts} prompts side by side" if side_by_side else f"prompt {numbers[0] + 1} of {self.prompts}"
        self.progress(numbers[0] * each + step, self.prompts * each, f"{where}: {what}")

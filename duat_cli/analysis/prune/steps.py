"""Progress of the work on prompts; every prompt has the same number of steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duat_cli.analysis.progress import Progress

PASSES = 3  # steps of a prompt beside its ablations: one for its responses, two for its readings


@dataclass(frozen=True)
class Steps:
    """Reports what is being done under which prompts. numbers: of the prompts that go side by side."""

    progress: Progress
    prompts: int
    ablated: int
    """How many terms are ablated under each prompt."""

    def responding(self, numbers: Sequence[int], terms: int) -> None:
        """Announces the responses of so many terms."""
        self._say(numbers, 0, f"responses of {terms} terms")

    def reading(self, numbers: Sequence[int]) -> None:
        """Announces the exact readings."""
        self._say(numbers, 1, "exact readings")

    def ablating(self, numbers: Sequence[int]) -> Callable[[], None]:
        """A function to be called after each ablation."""
        steps = itertools.count(PASSES + 1)
        return lambda: self._say(numbers, next(steps), "ablating terms")

    def _say(self, numbers: Sequence[int], step: int, what: str) -> None:
        each, side_by_side = PASSES + self.ablated, len(numbers) > 1
        where = f"{self.prompts} prompts side by side" if side_by_side else f"prompt {numbers[0] + 1} of {self.prompts}"
        self.progress(numbers[0] * each + step, self.prompts * each, f"{where}: {what}")

"""An ablator whose damage is told, and prompts for it."""

from __future__ import annotations

from typing import Any

import torch

from duat_cli.analysis.prune.terms.damage import Hidden
from duat_cli.loading.prompts import Prompt


class Fake:
    """An ablator whose damage is a number a prompt, the more the larger the set."""

    def __init__(self, damage: Any) -> None:
        self.damage_of, self.metric, self.runs = damage, Hidden(None), 0  # type: ignore[arg-type]

    def place(self, prompt: Prompt) -> int:
        return prompt.line

    def record(self, ids: int) -> None:
        return None

    def removals(self, terms: Any) -> int:
        return len(list(terms))

    def damage(self, recorded: None, ids: int, removals: int) -> float:
        self.runs += 1
        return self.damage_of(ids, removals)


def prompts(count: int) -> list[Prompt]:
    return [Prompt("", str(k), torch.zeros(1, 1, dtype=torch.long), k) for k in range(count)]

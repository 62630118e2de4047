"""What Eq. 16 as printed takes of `prune-bound`: sets and whole parts on their way through the blocks."""

from __future__ import annotations

from dataclasses import dataclass

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import PruneOptions, Task, orders
from duat_cli.analysis.plan.terms import replayed
from duat_cli.kinds import WHOLE, Kind
from duat_cli.models.budgets import likely_sets, printed_bytes, printed_on, printed_vectors


@dataclass(frozen=True)
class Carried:
    """Vectors for every token."""

    parts: int
    """Of whole parts: each, and the stream without it."""
    early: int
    """Of one set of every order, chosen by what is predicted of it."""
    late: int
    """The same of orders of whole parts, chosen by what each of them does alone, once that is measured."""

    @property
    def once(self) -> int:
        """With one set of every order."""
        return self.parts + self.early + self.late


def carried(shape: Shape, counts: dict[Kind, int], options: PruneOptions) -> Carried:
    """counts: terms of each kind."""
    blocks = len(shape.parts.blocks)
    early, late = (
        sum(printed_vectors(sum(counts[kind] for kind in kinds), blocks) for kinds in some)
        for some in orders(counts, options)
    )
    return Carried(2 * sum(counts.get(kind, 0) for kind in WHOLE), early, late)


def printed_tokens(shape: Shape, task: Task, vectors: int, options: PruneOptions) -> list[int]:
    """Of the prompts that it is computed on. vectors: with one set of every order."""
    tokens = task.chosen_on
    return [tokens[k] for k in printed_on(tokens, options.spent.printed, shape.width, vectors)]


def printed_memory(
    shape: Shape, task: Task, counts: dict[Kind, int], options: PruneOptions, *, streamed: bool
) -> tuple[int, int]:
    """Bytes between two blocks, of all prompts side by side or of the longest, and those more in a block.

    Where no set is tried on held-out prompts, of the sets that are carried while it is measured which are chosen.
    """
    found = carried(shape, counts, options)
    tokens = printed_tokens(shape, task, found.once, options)
    longest, vectors = max(tokens, default=0), found.once
    wanted = found.late or found.early
    if streamed and tokens and wanted and not task.tested_on:
        vectors += (likely_sets(sum(tokens), shape.width, found.once - wanted, wanted) - 1) * wanted
    size = printed_bytes(sum(tokens) if streamed else longest, shape.width, vectors)
    return size, replayed(shape, vectors, longest)

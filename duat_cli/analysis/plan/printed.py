"""What Eq. 16 as printed takes of `prune-bound`: sets and whole parts on their way through the blocks."""

from __future__ import annotations

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.terms import replayed
from duat_cli.kinds import Kind
from duat_cli.models.sweep.budgets import PRINTED_TERMS, printed_bytes, printed_on

WAYS = 2  # the sum of a set's terms, and the stream without them


def printed_tokens(shape: Shape, task: Task, counts: dict[Kind, int], options: PruneOptions) -> list[int]:
    """Of the prompts that it is computed on. counts: terms of each kind."""
    sets, followed = _carried(counts)
    tokens = task.chosen_on
    return [tokens[k] for k in printed_on(tokens, options.spent.printed, shape.width, sets, followed)]


def printed_memory(shape: Shape, task: Task, counts: dict[Kind, int], options: PruneOptions, *, streamed: bool) -> int:
    """Bytes, of all prompts side by side or of the longest."""
    sets, followed = _carried(counts)
    tokens = printed_tokens(shape, task, counts, options)
    each, longest = [printed_bytes(n, shape.width, sets, followed) for n in tokens], max(tokens, default=0)
    return (sum(each) if streamed else max(each, default=0)) + replayed(shape, WAYS * sets + followed, longest)


def printed_values(counts: dict[Kind, int]) -> float:
    """How many vectors go through the attention of all blocks, with H held: of each on average half of them."""
    sets, followed = _carried(counts)
    return (WAYS * sets + followed) / 2


def _carried(counts: dict[Kind, int]) -> tuple[int, int]:
    """Sets and whole parts, and terms that are carried one by one, at most."""
    there = {kind: count for kind, count in counts.items() if count}
    parts = sum(there.get(kind, 0) for kind in ("block", "attention", "ffn"))
    return parts + len(there), sum(min(count, PRINTED_TERMS) for count in there.values())

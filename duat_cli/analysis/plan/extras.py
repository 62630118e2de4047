"""Memory and work of what `inspect` computes on request: every UAT term by itself, the path of every source token,
spectral norms, and the origin of the attention weights.

N: tokens; M: numbers of a token between blocks; L: blocks; H, K, d: heads, KV heads and head size. The counts were
measured on a llama shape of 12 blocks.
"""

from __future__ import annotations

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import REPLAYED, Moment, term
from duat_cli.models.budgets import SOURCE_ELEMENTS
from duat_cli.results.plan import MemoryTerm

SOURCES = 5  # (N, N, M): both pieces in front of a block, one behind it, the other in parts, then put together
KEPT_SOURCES = 2  # the same between blocks
LANCZOS = 104  # vectors of (N, M) in float64: both bases after 32 steps, and a copy
PAIRS = 9  # (N, N) in float64: scores of a head, what explains them, and both over the attended pairs


def kept(shape: Shape, task: Task, n: int) -> Moment:
    """What is held from block to block for a prompt of n tokens."""
    vector = n * shape.stream * shape.wide
    terms = len(shape.parts.blocks) * vector if "terms" in task.extras else 0
    sources = KEPT_SOURCES * n * vector if "end_to_end" in task.extras else 0
    return [term("UAT terms, one by one", terms), term("paths of source tokens", sources)]


def replays(shape: Shape, task: Task, n: int) -> MemoryTerm:
    """What carrying these through one block takes beyond `kept`; terms go before source tokens."""
    vector = n * shape.stream * shape.wide
    terms = (REPLAYED - 1) * len(shape.parts.blocks) * vector if "terms" in task.extras else 0
    sources = 0.0
    if "end_to_end" in task.extras:
        some = REPLAYED * min(SOURCE_ELEMENTS * shape.wide, n * vector)
        sources = (SOURCES - KEPT_SOURCES) * n * vector + max(0, some - n * vector)
    return term("replays of terms and source tokens", max(terms, sources))


def statistics(shape: Shape, task: Task, n: int) -> MemoryTerm:
    """What is measured behind a block: first the origin of H, then the spectral norm."""
    routing, spectrum = 0, 0
    if "routing" in task.extras:
        turned = (shape.heads + shape.kv_heads) * n * shape.head_width**2 * shape.wide
        routing = turned + 8 * PAIRS * n**2
    if "spectrum" in task.extras:
        spectrum = 8 * LANCZOS * n * shape.stream
    return term("spectra, queries and keys", max(routing, spectrum))


def passes(shape: Shape, task: Task, n: int) -> float:
    """How many passes of a prompt of n tokens these take as long as."""
    sources = 2 * n if "end_to_end" in task.extras else 0
    terms = len(shape.parts.blocks) / 2 if "terms" in task.extras else 0
    return sources + terms

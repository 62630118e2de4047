"""Memory and work of `prune-bound --repair`: sums over tokens for one layer at a time, and new weights of some sets.

M: hidden size; K: the most inputs of a layer that is refitted; T: calibration tokens.
"""

from __future__ import annotations

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import Moment, term
from duat_cli.models.budgets import KEPT_BYTES

SUMS = 5  # (K, K) and (K, M): for tokens fitted and held back, two while they are solved, and one temporary
SETS = 3  # sets whose new weights are in memory at once: the chosen one, the one under way, the one before it
STREAMS = 6  # (T, M): before and behind a block, for the dense and the pruned model, a layer's output, and one more
ROWS = 4  # (N, K) for one prompt: as they are, in float64, those kept, with a column of ones
REPAIRED = 12  # sets of each kind: four to bisect the curve, eight to test
RUNS = 4  # runs of every block per set: for each of two layers; and for both halves together
SOLVED = 9 + 2 * 5  # systems per layer: every ridge, and again with all tokens; for each half those near that ridge
OWN = 2  # (T, M) per block that are kept of the dense model: behind the block, and behind attention


def repairing(shape: Shape, task: Task) -> Moment:
    """The terms of a repair, beside the model."""
    tokens = task.calibration or task.tokens
    inputs, layers = _inputs(shape)
    blocks = len(shape.parts.blocks)
    every = blocks * sum(layers)
    row = (blocks * shape.width + (shape.vocabulary or shape.width)) * shape.element
    return [
        term("sums over tokens of a layer", SUMS * inputs * (inputs + shape.width) * 8),
        term("new weights of sets", SETS * every * shape.width * shape.element),
        term("calibration prompts in front of a block", STREAMS * sum(tokens) * shape.stream * shape.element),
        term(
            "the dense model's states, kept", min(KEPT_BYTES, OWN * blocks * sum(tokens) * shape.stream * shape.element)
        ),
        term("prompts' own passes, kept", min(KEPT_BYTES, sum((*task.chosen_on, *task.tested_on)) * row)),
        term("inputs of a layer", sum(tokens) * inputs * shape.element),
        term("inputs of a layer under one prompt", ROWS * max(tokens, default=0) * inputs * 8),
        term("masks of the calibration prompts", sum(n * n for n in tokens) * shape.element),
    ]


def solving(shape: Shape, tokens: int) -> float:
    """Operations for the sums and solutions of one set. tokens: of all calibration prompts."""
    found = 0.0
    for inputs in _inputs(shape)[1]:
        sums = 2 * tokens * inputs * (inputs + shape.width)
        found += 2 * sums + SOLVED * (inputs**3 / 3 + 4 * inputs**2 * shape.width)
    return found * len(shape.parts.blocks)


def _inputs(shape: Shape) -> tuple[int, tuple[int, int]]:
    """The most inputs of a layer, and the inputs of each: the FFN's last layer and attention's."""
    layers = shape.inner, shape.heads * shape.head_width
    return max(layers), layers

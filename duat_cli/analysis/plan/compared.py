"""Work of two versions of a weight side by side: the spectrum of a change, and how it lies to the base."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.loading.checkpoint.headers import TensorEntry

# operations of a matrix product that take as long, measured; l, s: the longer and the shorter side of a matrix
EXACT = 75, 45  # l s²: singular vectors of base, tuned weight and change, of a dense one and of low-rank factors
DIRECTIONS = 15, 5  # l s² of a larger matrix, with --directions: values of the change, Lanczos for the others
LEADING = 6000, 300  # l s of a larger matrix without: what leads a dense change, and the norms of factors
ENTRY = 2000  # an entry: difference, norms, and what rounding may have made of it


def comparing_operations(shape: Shape, task: Task) -> float:
    """Of `lora-diff`, beside the passes; of a tuned checkpoint every tensor is taken to differ."""
    if task.command != "lora-diff":
        return 0.0
    from duat_cli.operators.lowrank import EXACT_SIDE

    low_rank = task.tuned is None
    found = 0.0
    for tensor in task.changed if low_rank else _tensors(shape):
        rows, columns, count = _matrices(tensor)
        long, short = max(rows, columns), min(rows, columns)
        if short <= EXACT_SIDE:
            each = EXACT[low_rank] * long * short**2
        else:
            each = (DIRECTIONS[low_rank] * short if task.directions else LEADING[low_rank]) * long * short
        found += count * each + (0 if low_rank else ENTRY * tensor.elements)
    return found


def _tensors(shape: Shape) -> Iterable[TensorEntry]:
    parts = shape.parts
    return (tensor for part in (parts.frame, *parts.layers, *parts.blocks) for tensor in part.tensors.values())


def _matrices(tensor: TensorEntry) -> tuple[int, int, int]:
    """Rows, columns and how many there are: of a stack of experts one an expert; none of a vector."""
    if len(tensor.shape) < 2:
        return 0, 0, 0
    if len(tensor.shape) == 3:
        return tensor.shape[1], tensor.shape[2], tensor.shape[0]
    return tensor.shape[0], tensor.elements // max(1, tensor.shape[0]), 1

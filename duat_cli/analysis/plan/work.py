"""How much a run reads and multiplies."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.waves import waves
from duat_cli.results.plan import Planned, Residence

CHECKED = 32  # tokens of the random prompt on which the pass under instruments is compared with the plain one


def operations(shape: Shape, command: Planned, tokens: Sequence[int]) -> float:
    """Floating-point operations of the passes: 2 P T + 4 L N² H d each.

    P: elements of the blocks' matrices that a token meets; T = N tokens; L blocks. The first prompt (`verify`: each)
    and one of random tokens run twice, with and without instruments.
    """
    plain = tokens if command == "verify" else tokens[:1]
    side = len(shape.parts.blocks) * shape.heads * shape.head_width
    return sum(2 * shape.products * n + 4 * side * n * n for n in (*tokens, *plain, CHECKED, CHECKED))


def weight_reads(shape: Shape, command: Planned, tokens: Sequence[int], weights: Residence) -> float:
    """Bytes read / bytes of all tensors in the files.

    Streamed, every wave of prompts reads the blocks once, and `matrix` once more, for their number; one block is read
    in vain, ahead of time, behind the first large layer. Rows of embeddings that a prompt needs are left out.
    """
    parts = shape.parts
    once = parts.frame.stored + sum(layer.stored for layer in parts.layers)
    blocks = sum(block.stored for block in parts.blocks)
    total = once + blocks
    if weights == "resident" or not total:
        return 1.0
    ahead = sum(parts.blocks[0].stored for _ in parts.layers[:1]) if parts.blocks else 0
    sweeps = len(waves(tokens, shape.width, shape.element)) + (command == "matrix")
    return (once + blocks * sweeps + ahead) / total

"""Memory and work of `attribute`: prompts are recorded, then gradients of their targets go back block by block.

N: tokens; M: hidden size; F: longest side of a block's matrices; V: vocabulary; T: targets of a prompt. Where all
weights are in memory, one prompt goes after the other; otherwise as many side by side as their recorded passes fit.
"""

from __future__ import annotations

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import PREDICTIONS, Moment, held, layer_of, page_of, recorded_of, term, through_block
from duat_cli.analysis.plan.waves import recorded_waves
from duat_cli.models.budgets import TARGET_BYTES, target_bytes
from duat_cli.results.plan import Residence

LOGITS = 2  # (N, V) tensors beside the recorded output: output behind the last block, or gradients, and a copy
CARRIED = 2  # (T, N, M) tensors: gradients at a block's output, one for each reading
RETURNED = 32 << 20  # bytes; the allocator may keep smaller tensors when they are freed
PART_BYTES = 750  # of a token, a head or a unit of a prediction in the report
NEURON_BYTES, FLOW_BYTES = 2_600, 10_400  # of a leading neuron, and of a leading head's flow
WRITTEN = 1.5  # times the report's memory, while it is written as text
ROWS = 16  # bytes per number in the targets' rows of the output, which are too small to be given back when freed


def attribution(shape: Shape, task: Task, weights: Residence) -> list[Moment]:
    """The moments: the output with its gradients, gradients in a block, and the report."""
    ending = shape.vocabulary or shape.width
    every, page, head = held(shape, weights), page_of(shape), layer_of(shape)[:1]
    if weights == "resident":
        page = head = []
        waves = [[tokens] for tokens in task.tokens] or [[0]]
    else:
        waves = [[task.tokens[k] for k in wave] for wave in _waves(shape, task)]
    report = predicted(shape, task)
    found: list[Moment] = [[*every, term(PREDICTIONS, WRITTEN * report)]]
    every = [*every, term(PREDICTIONS, report)]
    for wave in waves:
        longest = max(wave, default=0)
        side = sum(recorded_of(shape, ending, n) for n in wave)
        recorded = term("the prompts' own passes", side)
        back = CARRIED * sum(task.targets_of(n) * n for n in wave) * shape.stream * shape.wide
        carried = term("gradients on their way back", back)
        count, each = task.targets_of(longest), target_bytes(longest, shape.stream, shape.inner)
        together = min(count, max(1, TARGET_BYTES // max(1, each))) * each
        output = term("the output and its gradients", LOGITS * longest * ending * shape.wide)
        gradients = term("gradients in a block", together)
        kept = [output] if output.bytes < LOGITS * RETURNED else []
        rows = term("the targets' rows of the output", ROWS * count * ending if count > 1 else 0)
        found += [
            [*every, *head, recorded, output],
            [*every, *page, recorded, *kept, carried, rows, gradients, through_block(shape, longest)],
        ]
    return found


def predicted(shape: Shape, task: Task) -> int:
    """Bytes of all predictions in the report."""
    blocks = len(shape.parts.blocks)
    flows, neurons = min(task.top, blocks * shape.heads), min(task.top, blocks * shape.inner)
    each = PART_BYTES * blocks * (shape.heads + 2) + FLOW_BYTES * flows + NEURON_BYTES * neurons
    return sum(task.targets_of(n) * (PART_BYTES * n + each) for n in task.tokens)


def backward_operations(shape: Shape, task: Task, passes: float) -> float:
    """Operations beyond one pass of every prompt, which takes `passes`: each block runs once more, then come its replay
    and the gradients of every target in both readings. Each greedy token takes one pass more."""
    targets = max((task.targets_of(n) for n in task.tokens), default=1)
    head = 2 * shape.width * shape.vocabulary * sum(task.tokens)
    return (1 + 2 * (1 + targets)) * passes + 3 * head + task.steps * (passes + head)


def attribution_reads(shape: Shape, task: Task) -> float:
    """How often streamed blocks are read: forwards and backwards for every wave, and once for every greedy token."""
    return 2 * len(_waves(shape, task)) + task.steps


def _waves(shape: Shape, task: Task) -> list[range]:
    return recorded_waves(task.tokens, len(shape.parts.blocks), shape.stream, shape.element)

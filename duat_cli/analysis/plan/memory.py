"""Peak memory of a run, as a sum of terms.

The sizes of tensors follow from the model's shape. The constants and the counts of tensors alive at once, here and in
the modules beside this one, were measured as peaks of processes on the bundled demo and on llama shapes of 135M and
1.1B parameters, Linux, CPU. They hold with `return_freed_memory`, without which glibc keeps up to a third more.

N: tokens of the longest prompt; M, H, K, d: hidden size, heads, KV heads and head size; F: the longest side of a
block's matrices; w: bytes of a number, at least 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from duat_cli.analysis.plan import extras
from duat_cli.analysis.plan.attribution import attribution, predicted
from duat_cli.analysis.plan.pair import beside_another, kept_prompts, look_at_weights, two_models
from duat_cli.analysis.plan.pair import shared as shared_pair
from duat_cli.analysis.plan.pruning import pruning
from duat_cli.analysis.plan.pruning import shared as shared_pruning
from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import (
    FORKED,
    PREDICTIONS,
    PREPARED,
    PROOF,
    READERS,
    READERS_SIZE,
    SHARING,
    STATES,
    STORED_BESIDE,
    STREAMS,
    STRUCTURE,
    Moment,
    heads_of,
    held,
    loading,
    on_gpu,
    page_of,
    proof_bytes,
    size_of,
    term,
    through_block,
)
from duat_cli.analysis.plan.waves import prompt_waves, state_bytes
from duat_cli.loading.checkpoint.parts import ROWS_BYTES
from duat_cli.models.budgets import (
    BATCH_BYTES_GPU,
    IMPULSES,
    MATRIX_SIDE,
    batched_bytes,
    measured_at_once,
    most_together,
)
from duat_cli.results.plan import MemoryTerm, Residence

SPARE = 1.25  # memory that must be left for a byte of a second model: the first one's blocks run beside it
ENTRIES = 2048  # sampled of every V_h O_h, kept for every block

# tensors alive at once
RECORDED = 2  # (H, N, N) behind a block: the recorded H, and H of W'
GRAMS = 2  # (N, H, M): the values through O, and an operand of their products
PIECES = 6  # elements of Ĥ that are worked on at once
IMPULSE_STATES = 2.4  # (channels, state) of every such value; the others of `STATES` are there once
KERNEL_ROWS = 2.5  # (channels, N, N) of H that such impulses show
KERNEL_SQUARES = 7.5  # (channels, channels) in float64: Gram matrices, their roots, products
PREPARED_FIRST, PREPARED_LENGTH, MOST_PREPARED = 20 << 20, 8 << 20, 176 << 20  # bytes: fixed, per length, at most
BATCHES = 40 << 20  # bytes of a batch, and of prompts that wait for theirs to fill; both are bounded


def peak(shape: Shape, task: Task, weights: Residence, tuned: Shape | None = None) -> Moment:
    """The terms of the largest moment of a run. tuned: shape of the tuned checkpoint beside it."""
    moments = look_at_weights(shape, task, weights, tuned)
    if task.runs and task.command == "lora-diff":
        moments += two_models(shape, task, weights, tuned)
    elif task.runs:
        moments += _resident(shape, task) if weights == "resident" else _streamed(shape, task)
        moments += attribution(shape, task, weights) if task.command == "attribute" else []
        moments += pruning(shape, task, weights) if task.pruning is not None else []
        moments += [[*held(shape, weights), _written_out(shape, task)]] if task.command == "matrix" else []
        if task.command == "compare":
            beside = kept_prompts(shape, task, weights)
            moments = [[*moment, beside] for moment in moments]
    if task.runs:
        moments = [[*moment, _prepared(shape, task, 1)] for moment in moments]
    if task.probe:
        moments = [[*moment, term(READERS, READERS_SIZE)] for moment in moments]
    if task.gpu:
        moments = [on_gpu(shape, moment) for moment in moments]
    return max(moments, key=size_of)


def _written_out(shape: Shape, task: Task) -> MemoryTerm:
    """The paper's matrices of one block, as far as their sides allow: W'_HV, W'_O and W'_HVO, beside them W'_O W'_HV
    with its distance from W'_HVO, or W (x) I_c with as many columns c as can be built."""
    tokens, inner = max(task.tokens, default=0), shape.heads * shape.head_width
    columns = min(shape.width, MATRIX_SIDE // max(shape.width, inner))
    dense, beside = 0, columns**2 * shape.width * inner
    if tokens * max(shape.width, inner) <= MATRIX_SIDE:
        square = (tokens * shape.width) ** 2
        dense, beside = 2 * tokens**2 * shape.width * inner + square, max(beside, 2 * square)
    return term("the paper's matrices, entry by entry", (dense + beside) * shape.wide)


def _has_statistics(task: Task) -> bool:
    """Whether statistics of W' are computed, beyond its comparison with the model."""
    return task.command in ("inspect", "check", "compare")


def _prepared(shape: Shape, task: Task, processes: int) -> MemoryTerm:
    """Memory of code that is generated for each size of product in half precision. Every length of prompt has sizes of
    its own; ablations have more sizes than are kept."""
    if shape.element == shape.wide:
        return term(PREPARED, 0)
    each = PREPARED_FIRST + -(-len(set(task.tokens)) // processes) * PREPARED_LENGTH
    return term(PREPARED, processes * (min(each, MOST_PREPARED) if task.pruning is None else MOST_PREPARED))


def shared(shape: Shape, task: Task, processes: int, tuned: Shape | None = None) -> Moment:
    """The moment at which forked processes have a prompt each, with weights in memory: what their parent holds, and
    what is their own.

    tuned: as for `peak`.
    """
    return [_prepared(shape, task, processes), *_shared(shape, task, processes, tuned)]


def _shared(shape: Shape, task: Task, processes: int, tuned: Shape | None) -> Moment:
    if task.command == "lora-diff":
        return shared_pair(shape, task, tuned, processes)
    if task.command == "prune-bound":
        return shared_pruning(shape, task, processes)
    if task.pruning is not None:
        parts = _shared(shape, replace(task, pruning=None), processes, None), shared_pruning(shape, task, processes)
        return max(parts, key=size_of)
    every, longest = held(shape, "resident"), sorted(task.tokens)[-processes:]
    task = replace(task, probe=0)  # blocks are proved before processes are forked
    own = processes * (FORKED + len(shape.parts.blocks) * STRUCTURE + size_of(_together(shape, task)))
    if task.command == "attribute":
        alone = (attribution(shape, replace(task, tokens=(tokens,)), "resident") for tokens in longest)
        own += sum(max(map(size_of, one)) - size_of(every) for one in alone)
        return [*every, term(PREDICTIONS, predicted(shape, task)), term(SHARING, own)]
    working = sum(size_of(_at_a_block(shape, task, tokens)) for tokens in longest)
    return [*every, _values(shape), _entries(shape, task), term(SHARING, own + working)]


def _resident(shape: Shape, task: Task) -> list[Moment]:
    """The moments with all weights in memory: while they are read, beside stored tensors; and while the model runs."""
    every, first = held(shape, "resident"), held(shape, "resident", running=False)
    kept = [] if task.command == "attribute" else [_values(shape), *_together(shape, task)]
    return [[*first, loading(shape, gpu=task.gpu)], [*every, *kept, *_working(shape, task)]]


def _values(shape: Shape) -> MemoryTerm:
    """All V of the model, twice: as read, and with the gain of the norm in front; for weights in half precision also O
    in float32; and factors of kernels with a head per channel. `attribute` needs none of these."""
    blocks, wider = len(shape.parts.blocks), shape.outputs if shape.element < shape.wide else 0
    return term("values of all blocks, V", blocks * (2 * shape.values + wider) + kernel_factors(shape))


def kernel_factors(shape: Shape, kernels: int | None = None) -> int:
    """Bytes of O of so many blocks whose kernel treats each channel by itself (None: all of them), and of the V that
    they share."""
    if not shape.measured_kernels:
        return 0
    outputs = (shape.kernels if kernels is None else kernels) * shape.channels * shape.width
    return (outputs + shape.channels**2) * shape.wide


def _together(shape: Shape, task: Task) -> Moment:
    most = most_together(max(task.prompts, len(task.tokens)))
    if task.command != "inspect" or most == 1:
        return []
    largest = most * batched_bytes(max(task.tokens, default=0), shape.stream, shape.heads, shape.wide)
    return [term("batches of prompts", min(BATCH_BYTES_GPU, largest) if task.gpu else BATCHES)]


def _streamed(shape: Shape, task: Task) -> list[Moment]:
    """The moments with weights read block by block. A block is in memory beside the stored bytes it is made from, then
    beside those of the next block. After the blocks, with V and O of the last one, embeddings and heads are read in
    pieces; or as a whole where they are drawn for the re-initialised model, run for a loss, or stored in another form
    than used."""
    every = held(shape, "streamed")
    sizes = [state_bytes(count, shape.stream, shape.element) for count in task.tokens]
    wave = prompt_waves(task.tokens, shape.stream, shape.element)
    waiting = max(sum(sizes[number] for number in numbers) for numbers in wave)
    beside = _kept_beside(shape, task, wave)
    found: list[Moment] = [
        [
            *every,
            *page_of(shape),
            term("values of the block, V", 2 * shape.values + kernel_factors(shape, 1)),
            term("prompts in front of the block", waiting + beside),
            *_working(shape, task),
        ]
    ]
    behind = [
        *every,
        term("V and O of the last block", 2 * shape.values + shape.outputs + kernel_factors(shape, 1)),
        _entries(shape, task),
    ]
    stored = max((block.read for block in shape.parts.blocks), default=0)
    run = heads_of(shape) if task.command in ("check", "compare") else []
    for layer in shape.parts.layers:
        size = layer.elements * shape.element
        beside = stored if size == layer.read else max(layer.read, stored)
        if task.reinitialised or layer in run or any(tensor.made for tensor in layer.tensors.values()):
            found.append([*behind, term(layer.name, size), term(STORED_BESIDE, beside)])
        else:
            found.append([*behind, term("a piece of a layer, as stored and as it is used", 3 * ROWS_BYTES)])
    return found


def _kept_beside(shape: Shape, task: Task, waves: Sequence[range]) -> int:
    """What is held on request for the other prompts of a wave, beside the longest prompt."""
    sizes = [size_of(extras.kept(shape, task, count)) for count in task.tokens]
    return max(sum(sizes[number] for number in numbers) for numbers in waves) - max(sizes, default=0)


def _working(shape: Shape, task: Task) -> Moment:
    """Working memory for the longest prompt at one block."""
    return [*_at_a_block(shape, task, max(task.tokens, default=0)), _entries(shape, task)]


def _at_a_block(shape: Shape, task: Task, n: int) -> Moment:
    """Working memory for a prompt of n tokens at one block: that of its pass, or of the statistics of W', if larger.

    The Gram matrix of the heads is a sum over (H d, H d) products, two in w and one in float64, and one of (K d, K d).
    """
    scores, streams = shape.heads * n**2 * shape.wide, STREAMS * shape.stream * n * shape.wide
    proof = [term(PROOF, proof_bytes(shape, task.probe))]
    kept = extras.kept(shape, task, n)
    carried = [through_block(shape, n), extras.replays(shape, task, n)]
    through = [*kept, *max(carried, proof, *_kernel(shape, task, n), key=size_of)]
    if not _has_statistics(task):
        return through
    side, few = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    gram = side * side * (2 * shape.wide + 8) + few * (few + shape.width) * shape.wide
    pieces = PIECES * min(measured_at_once(shape.heads, gpu=task.gpu), shape.heads * n * n) * shape.wide
    products = GRAMS * shape.width * shape.heads * n * shape.wide
    after = [
        term("one prompt behind one block", RECORDED * scores + streams),
        term("statistics of W'", max(gram, products + pieces)),
    ]
    if task.command == "compare" and not task.patch:
        after[1] = max(term(after[1].what, gram), beside_another(shape, n), key=lambda one: one.bytes)
    asked = [after[0], extras.statistics(shape, task, n)]
    return max(through, [*kept, *after], [*kept, *asked], key=size_of)


def _kernel(shape: Shape, task: Task, n: int) -> list[Moment]:
    """The moments of a kernel that treats each channel by itself: while impulses prove its form and show H of a prompt,
    then during statistics with a head per channel."""
    one = n * shape.channels
    states = (IMPULSE_STATES * max(IMPULSES, one) + (STATES - IMPULSE_STATES) * one) if one else 0
    impulses = term("impulses in the kernel", states * shape.state * shape.wide)
    if not _has_statistics(task) or not shape.measured_kernels:
        return [[impulses]]
    rows = term("H of a kernel, by channel", KERNEL_ROWS * shape.channels * n * n * shape.wide)
    return [[impulses, rows], [term("statistics of W', by channel", KERNEL_SQUARES * 8 * shape.channels**2), rows]]


def _entries(shape: Shape, task: Task) -> MemoryTerm:
    size = ENTRIES * shape.heads * shape.wide * len(shape.parts.blocks)
    return term("entries of V O", size if _has_statistics(task) else 0)

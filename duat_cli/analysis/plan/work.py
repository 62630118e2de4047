"""Work of a run: the bytes it reads, and the operations it takes."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.analysis.plan import extras
from duat_cli.analysis.plan.attribution import attribution_reads, backward_operations
from duat_cli.analysis.plan.pruning import (
    SETS,
    ablation_bytes,
    carried,
    ends_in_logits,
    followed_terms,
    printed_tokens,
    singles,
    terms_of,
)
from duat_cli.analysis.plan.repair import REPAIRED, RUNS, solving
from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import PruneOptions, Task, orders, rivals
from duat_cli.analysis.plan.terms import CHECKED
from duat_cli.analysis.plan.waves import prompt_waves
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.results.plan import Residence

# Constants without another unit count operations of a matrix product that takes as long.
REPLAYS = 2  # passes that take as long as the replays of a block
STATISTICS = 3  # passes that take as long as the replays of a block and the statistics of W'
# a kernel that treats each channel by itself
KERNEL_STEP = 700  # per value of its state: a few steps of its own code
KERNEL_SPECTRUM = 12  # C³: Gram matrices and eigenvalues of so many heads
# certified bounds of a block, measured on a 135M and a 7B llama shape
BOUNDED_NEURON = 3e6  # per gated neuron: the search over an angle
BOUNDED_HEAD = 100  # M d² per head: two QR factorisations and singular values
EIGENVALUES = 15  # M³: eigenvalues of a Gram matrix, in float64
SPECTRAL_SIDE = 1536  # M up to which whole FFNs and attention are bounded by singular values, as in operators.bounds
DRAWN = 300  # per random weight
SWEPT = 2  # passes of a prompt for Eq. 16, under instruments and without
PATCHED = 5  # reads of the blocks with --patch: what is captured, the head, records, own parts, the patches
# of two versions of a weight side by side: the spectrum of a change, and how it lies to the base; operations of a
# matrix product that take as long, measured; l, s: the longer and the shorter side of a matrix
EXACT = 75, 45  # l s²: singular vectors of base, tuned weight and change, of a dense one and of low-rank factors
DIRECTIONS = 15, 5  # l s² of a larger matrix, with --directions: values of the change, Lanczos for the others
LEADING = 6000, 300  # l s of a larger matrix without: leading values of a dense change, norms of factors
ENTRY = 2000  # per entry: difference, norms, and the possible effect of rounding


def operations(shape: Shape, task: Task) -> float:
    """Floating-point operations of the passes: 2 P T + 4 L N² H d each.

    P: elements of the blocks' matrices that a token meets; T = N tokens; L blocks. The first prompt (`verify`: each)
    and one of random tokens run twice, with and without instruments; a tuned model as often as its base.
    """
    if not task.runs:
        return 0.0
    plain = task.tokens if task.command == "verify" else task.tokens[:1]
    swept = _passes(shape, (*task.tokens, *plain, CHECKED, CHECKED))
    if task.command == "attribute":
        return swept + backward_operations(shape, task, _passes(shape, task.tokens))
    return swept * (2 if task.command == "lora-diff" else 1) + pruning_operations(shape, task)


def statistics_operations(shape: Shape, task: Task) -> float:
    """Floating-point operations of what is computed behind the blocks."""
    if not task.runs or task.command in ("matrix", "attribute"):
        return 0.0
    if task.command == "verify":
        return REPLAYS * _passes(shape, task.tokens)
    models = 2 if task.command == "lora-diff" else 1
    grams = 0.0 if task.command == "prune-bound" else _grams(shape)
    asked = sum(extras.passes(shape, task, n) * _passes(shape, [n]) for n in task.tokens)
    return models * (STATISTICS * _passes(shape, task.tokens) + grams) + _kernels(shape, task.tokens) + asked


def untrained_operations(shape: Shape, task: Task, weights: Residence) -> float:
    """Operations for the re-initialised model: drawing its weights (twice if streamed, for the generator's state), and
    its statistics under every count of tokens."""
    if not (task.runs and task.reinitialised):
        return 0.0
    counts = set(task.tokens)
    drawn = (1 if weights == "resident" else 2) * DRAWN * shape.weights / shape.element
    return drawn + (1 + STATISTICS) * _passes(shape, counts) + _grams(shape) + _kernels(shape, counts)


def _grams(shape: Shape) -> float:
    """Operations for the Gram matrices of all heads: products of V and of O, each with itself."""
    side, few = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    return 2 * shape.width * (side**2 + few**2) * len(shape.parts.blocks)


def _kernels(shape: Shape, tokens: Iterable[int]) -> float:
    """Operations for kernels that treat each channel by itself: impulses, with a pass of N tokens for each token, and
    sums over pairs of heads for every pair of tokens."""
    by_pair = KERNEL_STEP * shape.channels * shape.state + 6 * shape.channels**2
    each = (by_pair * n**2 + KERNEL_SPECTRUM * shape.channels**3 for n in tokens)
    return shape.measured_kernels * sum(each)


def pruning_operations(shape: Shape, task: Task) -> float:
    """Operations of `prune-bound`, beyond one pass of every prompt.

    Each probe goes back through the blocks at the price of a pass; an ablation of a term in the sample begins in the
    middle of the model on average; and carried terms go through the attention of the blocks behind them.
    """
    options = task.pruning
    if options is None:
        return 0.0
    counts = terms_of(shape, options)
    taken, groups = singles(counts, options), sum(map(len, orders(counts, options)))
    head = 2 * shape.width * shape.vocabulary if ends_in_logits(shape, options) else 0
    tokens, held_out = sum(task.chosen_on), sum(task.tested_on)
    once, apart = _passes(shape, task.chosen_on), _passes(shape, task.tested_on)
    sets = (SETS + options.spent.points) * groups
    gradients = (options.probes + 2) * (once + head * tokens)
    removed = (taken / 2 + sets) * once + (taken + sets) * head * tokens
    tried = (options.spent.tested * groups + rivals(counts, options)) * (apart + head * held_out)
    values = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_width * len(shape.parts.blocks)
    vectors, shown = carried(shape, options).once, printed_tokens(shape, task)
    moved = (followed_terms(counts, options) * tokens + vectors * sum(shown)) / 2 * values
    swept = SWEPT * _passes(shape, shown)
    certified = certified_operations(shape, options) if options.spent.certified else 0.0
    repaired = _repaired(shape, task, once, apart) * groups if options.repair else 0.0
    return gradients + removed + tried + moved + swept + certified + repaired


def certified_operations(shape: Shape, options: PruneOptions) -> float:
    """Operations for certified bounds of every neuron and head, and of FFNs, attention and blocks if asked for."""
    width, kinds = shape.width, set(options.kinds)
    block = BOUNDED_NEURON * shape.inner + BOUNDED_HEAD * shape.heads * width * shape.head_width**2
    if width <= SPECTRAL_SIDE and kinds & {"attention", "block"}:
        block += EIGENVALUES * width**3
    if width <= SPECTRAL_SIDE and kinds & {"ffn", "block"}:
        block += 2 * EIGENVALUES * width**3 + 8 * shape.inner * width**2
    return block * len(shape.parts.blocks)


def _repaired(shape: Shape, task: Task, once: float, apart: float) -> float:
    """Operations to repair the sets of one order: to fit them, and to run them without and with the repair."""
    tokens = task.calibration or task.tokens
    fitted = RUNS * _passes(shape, tokens) + solving(shape, sum(tokens))
    return REPAIRED * (fitted + 2 * once) + 2 * task.pruned.spent.tested * apart


def weight_reads(shape: Shape, task: Task, weights: Residence) -> float:
    """Bytes read / bytes of all tensors in the files.

    Streamed, every wave of prompts reads the blocks once, and `matrix` once more, for their number, as `compare` for
    what is predicted, of a model without a head not at all, and with --patch as often as `PATCHED` says; of `lora-diff`
    both models once more, for their discovery, and a head for the logits of every wave; `prune-bound` as its passes go.
    Rows of embeddings that a prompt needs are left out.
    """
    parts = shape.parts
    layers = [layer.stored for layer in parts.layers]
    blocks, once = sum(block.stored for block in parts.blocks), parts.frame.stored + sum(layers)
    total = once + blocks
    looked_at = 1.0 if task.command in ("check", "lora-diff") else 0.0
    looked_at += task.tuned is not None
    if not task.runs or not total:
        return looked_at or 1.0
    if weights == "resident":
        return looked_at + (2 if task.tuned is not None else 1)
    head = max(layers, default=0) if shape.vocabulary else 0
    if task.command == "lora-diff":
        waves = len(prompt_waves(task.tokens, shape.stream, shape.element))
        return looked_at + 2 * (once + blocks + waves * (blocks + head)) / total
    if task.command == "attribute":
        return (once + head + attribution_reads(shape, task) * blocks) / total
    found = 0.0
    if task.command != "prune-bound":
        waves = len(prompt_waves(task.tokens, shape.stream, shape.element))
        predicted = task.command == "compare" and not task.fixed and shape.vocabulary > 0
        again = (task.command == "matrix" or predicted) + (PATCHED if task.patch else 0)
        found += once + blocks * (waves + again)
    if task.pruning is not None:
        head = max(layers, default=0) if ends_in_logits(shape, task.pruning) else 0
        found += once + 3 * blocks + 2 * head + _more_sweeps(shape, task) * (blocks + head)
    return looked_at + found / total


def _more_sweeps(shape: Shape, task: Task) -> int:
    """Reads beyond the first three: for ablations that do not fit beside the readings, for sets of whole parts, which
    follow from what was measured there, and for the trial. If likely sets are chosen, Eq. 16 needs no read of its
    own."""
    together, apart = ablation_bytes(shape, task)
    _, late = orders(terms_of(shape, task.pruned), task.pruned)
    return max(0, -(-together // task.waiting) - 1) + bool(late) + -(-apart // task.waiting)


def _passes(shape: Shape, tokens: Iterable[int]) -> float:
    side = len(shape.parts.blocks) * shape.heads * shape.head_width
    return sum(2 * shape.products * n + 4 * side * n * n for n in tokens)


# -- lora-diff: two versions of a weight side by side --------------------------------------------------------


def comparing_operations(shape: Shape, task: Task) -> float:
    """Operations of `lora-diff`, beside the passes. For a tuned checkpoint, every tensor is assumed to differ."""
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
    """Rows, columns and number of a tensor's matrices: one per expert in a stack of experts, none in a vector."""
    if len(tensor.shape) < 2:
        return 0, 0, 0
    if len(tensor.shape) == 3:
        return tensor.shape[1], tensor.shape[2], tensor.shape[0]
    return tensor.shape[0], tensor.elements // max(1, tensor.shape[0]), 1

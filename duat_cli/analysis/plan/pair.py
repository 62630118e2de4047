"""Memory for weights that are looked at tensor by tensor, for two models side by side, and for two prompts."""

from __future__ import annotations

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import (
    FORKED,
    PROOF,
    REUSED,
    SHARING,
    STRUCTURE,
    TORCH,
    Moment,
    held,
    layer_of,
    loading,
    page_of,
    probed,
    proof_bytes,
    size_of,
    structure_bytes,
    term,
    through_block,
)
from duat_cli.analysis.plan.waves import prompt_waves, state_bytes
from duat_cli.models.budgets import ABLATION_BYTES, PATCH_VECTORS, waiting_bytes
from duat_cli.results.plan import MemoryTerm, Residence

PLAIN = 60 << 20  # Python and duat, without torch
PIECE = 64 << 20  # of a tensor that is looked at piece by piece
ADAPTED, COMPARED = 4, 6.5  # a matrix in float64: its change, and what spectrum and rounding of it take
TESTED = 3  # the same of a layer that Eq. 18 is tested on
STATES = 8  # (N, M) of a block under one prompt, kept until another comes there: in and out, biases, the hidden layer
UNIFORM = 2  # (H, N, N) that are uniform, of both prompts
CHANGES = 12  # pieces of Ĥ: H and S of both, their differences, what these make
ELEMENTS = 1 << 20  # of each, as of `operators.input_change`, which imports torch
FREED = 20 << 20  # by the prompts' passes through two models, and not given back
PROOFS = 5  # of a block of both models on a probe as large as a picture, and as much that is freed in between
KEPT = 4  # (N, M) of a block that the other model's is compared with


def look_at_weights(shape: Shape, task: Task, weights: Residence, tuned: Shape | None) -> list[Moment]:
    """The moment at which tensors of the files are checked or compared; the base model is in memory, if it runs."""
    if task.command == "check":
        return [[term("libraries", PLAIN), term("a piece of a tensor", min(PIECE, shape.largest_tensor))]]
    if task.command != "lora-diff":
        return []
    change = ADAPTED * _inside(shape) if tuned is None else COMPARED * shape.largest_elements
    return [
        [
            *(held(shape, weights, running=False) if task.runs else [term("libraries", TORCH)]),
            term("a tensor, as stored", shape.largest_tensor * (1 if tuned is None else 2)),
            term("its change, in float64", 8 * change),
        ]
    ]


def two_models(shape: Shape, task: Task, weights: Residence, tuned: Shape | None) -> list[Moment]:
    """The moments with a base and a tuned model. With all weights in memory, the models share what an adapter leaves
    unchanged, and all blocks of the base are kept for one prompt; otherwise one block is kept for all prompts."""
    other, longest = tuned or shape, max(task.tokens, default=0)
    sizes = [state_bytes(count, shape.stream, shape.element) for count in task.tokens]
    tested = term("a layer that Eq. 18 is tested on, in float64", 8 * TESTED * _inside(shape))
    if weights == "resident":
        running = _both_resident(shape, task, tuned)
        proof = [probed(shape, task.probe), term(PROOF, proof_bytes(shape, task.probe))] if task.probe else []
        return [
            [*running, *proof],
            [*held(shape, weights, running=False), _second(shape, task, tuned), loading(other, gpu=task.gpu)],
            [*running, *_through_both(shape, longest)],
            [*running, tested],
        ]
    both = [
        *held(shape, weights),
        term("the tuned model's frame", other.parts.frame.elements * shape.element),
        term("the tuned model's structure", structure_bytes(other)),
        term(REUSED, FREED),
    ]
    wave = prompt_waves(task.tokens, shape.stream, shape.element)
    waiting = max((sum(2 * sizes[k] + _kept(shape, task.tokens[k]) for k in numbers) for numbers in wave), default=0)
    prompts = term("prompts of both models", waiting)
    pages = [
        *both,
        *page_of(shape),
        *page_of(other),
        term("V and O of the blocks", 4 * shape.values + 2 * shape.outputs),
    ]
    return [
        [*pages, prompts, through_block(shape, longest)],
        [*pages, prompts, tested],
        [*pages, prompts, term(PROOF, PROOFS * proof_bytes(shape, task.probe))],
        [*both, *layer_of(shape), *layer_of(other)[:1], prompts],
    ]


def shared(shape: Shape, task: Task, tuned: Shape | None, processes: int) -> Moment:
    """The moment of `memory.shared`, for `lora-diff`."""
    structures = len(shape.parts.blocks) * 2 * STRUCTURE
    own = processes * (FORKED + structures)
    own += sum(size_of(_through_both(shape, tokens)) for tokens in sorted(task.tokens)[-processes:])
    return [*_both_resident(shape, task, tuned), term(SHARING, own)]


def _both_resident(shape: Shape, task: Task, tuned: Shape | None) -> Moment:
    blocks = len(shape.parts.blocks)
    return [
        *held(shape, "resident"),
        _second(shape, task, tuned),
        term("the tuned model's structure", structure_bytes(tuned or shape)),
        term(REUSED, FREED),
        term("values of all blocks, V", 4 * blocks * shape.values),
        term("outputs of all blocks, O", blocks * shape.outputs),
    ]


def _second(shape: Shape, task: Task, tuned: Shape | None) -> MemoryTerm:
    changed = sum(tensor.elements for tensor in task.changed)
    return term("weights of the tuned model", changed * shape.element if tuned is None else tuned.weights)


def _through_both(shape: Shape, tokens: int) -> Moment:
    """Memory for one prompt, with all weights in memory."""
    kept = len(shape.parts.blocks) * _kept(shape, tokens)
    return [term("one prompt in all blocks of the base", kept), through_block(shape, tokens)]


def kept_prompts(shape: Shape, task: Task, weights: Residence) -> MemoryTerm:
    """Memory that `compare` keeps of prompts: states of blocks under the first prompt, until the others have gone
    through them; with --fixed the attention matrices of all prompts, and their mean; with --patch also the inputs and
    outputs of blocks."""
    blocks, longest = len(shape.parts.blocks), max(task.tokens, default=0)
    scores = shape.heads * longest**2 * shape.wide
    state = (blocks if weights == "resident" else 1) * (scores + STATES * shape.stream * longest * shape.wide)
    if task.fixed:
        return term("attention of all prompts", (len(task.tokens) + 1) * blocks * scores)
    if task.patch:
        vectors = PATCH_VECTORS * shape.stream * longest * shape.wide
        kept = (len(task.tokens) + 1) * blocks * (scores + vectors)
        if weights == "streamed":  # a pass per head or token, with its own values and with those of another prompt
            passes = 2 * len(task.tokens) * blocks * max(shape.heads, longest)
            kept += min(ABLATION_BYTES, passes * waiting_bytes(longest, shape.stream))
        return term("what is kept of all prompts", kept + state)  # freed in between, but not always used again
    return term("the first prompt in the blocks", state)


def beside_another(shape: Shape, tokens: int) -> MemoryTerm:
    """Of `compare`: what a block did under the second prompt, and pieces of Ĥ of both in float64."""
    elements = shape.heads * tokens**2
    second = (UNIFORM + 1) * elements * shape.wide + STATES * shape.stream * tokens * shape.wide
    return term("two prompts in one block", second + CHANGES * 8 * min(ELEMENTS, elements))


def _inside(shape: Shape) -> int:
    """Elements of the largest tensor of a block."""
    return max((t.elements for block in shape.parts.blocks for t in block.tensors.values()), default=0)


def _kept(shape: Shape, tokens: int) -> int:
    return (shape.heads * tokens**2 + KEPT * shape.stream * tokens) * shape.wide

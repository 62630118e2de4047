"""Memory of `prune-bound`: its own moments, beside those of any sweep, and the vectors that Eq. 16 carries.

N: tokens; M: hidden size; F: longest side of a block's matrices; V: vocabulary; L: blocks; K: probes. Where all weights
are in memory, one prompt goes after the other; otherwise all of them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from duat_cli.analysis.plan.repair import repairing
from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import PruneOptions, Task, ablated, orders, rivals
from duat_cli.analysis.plan.terms import (
    NAMES,
    READINGS,
    REPORT,
    REUSED,
    SHARING,
    STORED_BESIDE,
    Moment,
    held,
    layer_of,
    page_of,
    probed,
    recorded_of,
    replayed,
    size_of,
    structure_bytes,
    term,
    through_block,
)
from duat_cli.compat.libc import GROWN
from duat_cli.kinds import WHOLE, Kind
from duat_cli.models.budgets import (
    BOUNDED_ENTRIES,
    CARRIED,
    GRADIENT_BYTES,
    LEADING,
    NEURONS_AT_ONCE,
    gradient_elements,
    likely_sets,
    printed_bytes,
    printed_on,
    printed_vectors,
    probes_at_once,
    rows_at_once,
    waiting_bytes,
)
from duat_cli.results.plan import MemoryTerm, Residence

RESPONSES = "responses of all terms"
SETS_ON_THEIR_WAY = "sets on their way to the last block"
CERTIFIED = "certified bounds of a block"
BATCHED = 12 << 20
FREED = 60 << 20  # freed by earlier prompts, but not given back
OUTPUTS, OUTPUT_BYTES = (6, 16), 144 << 20  # (N, V) freed but not given back: few prompts, many prompts; bytes at most
GRADIENTS = 0.4  # share of a block's gradients that is freed but not given back
PROBABILITIES = 3  # (N, V) beside the probes: probabilities of the model's output, and intermediate results
STREAM_GRADIENTS = 4  # (N, M) per probe in a block
INNER_GRADIENTS = 3  # (N, F), or (H, N, N), per probe in a block
NEURONS = 7  # (N, n) in float64 for n neurons: activations, and the effect of the norm on their branch
DOUBLE_FFN, DOUBLE_ATTENTION = 4, 6  # (n, M) in float64 for what is bounded at once
COPIED = 2  # times the model's structure, which a forked process copies as it counts references to Python's objects
SETS = 2  # sets of each order that are measured under every prompt, beside the points of its curve
TERM_BYTES = 4200  # of a term in the report
NAME_BYTES = 110  # of a term's name
READING_BYTES = 220  # of a term under one prompt
RESPONSE_BYTES = 4  # per probe, term and prompt
PREDICTED_BYTES = 16  # as RESPONSE_BYTES, while damage is predicted: stacked, squared, and in float64


def pruning(shape: Shape, task: Task, weights: Residence) -> list[Moment]:
    """The moments of `prune-bound`: those of each prompt, of certified bounds, of the report, and of repair."""
    options, streamed = task.pruned, weights == "streamed"
    written = [probed(shape, task.probe)] if task.probe and not streamed else []  # once more for bounds; not given back
    moments = [
        *_by_prompt(shape, task, weights),
        *(
            [[*_sweep(shape, task, weights), *_page(shape, weights), term(CERTIFIED, _certified(shape))]]
            if options.spent.certified
            else []
        ),
        [*held(shape, weights), *_kept(shape, task, weights), term(REPORT, _report(shape, task))],
        *([[*_every(shape, task, weights), *repairing(shape, task)]] if options.repair and not streamed else []),
    ]
    return [[*moment, *written] for moment in moments]


def shared(shape: Shape, task: Task, processes: int) -> Moment:
    """The moment at which forked processes have a prompt each, with weights in memory: what their parent holds, and
    what is their own.

    What follows, the report above all, is made by the parent alone.
    """
    longest, each = sorted(task.chosen_on)[-processes:], -(-len(task.chosen_on) // processes)
    own = sum(_own(shape, replace(task, tokens=(tokens,) * each)) for tokens in longest)
    freed = term(REUSED, min(FREED, shape.weights))
    first = [*held(shape, "resident"), freed, *found_of_terms(shape, task)]
    return [*first, term(SHARING, own)]


def _own(shape: Shape, one: Task) -> int:
    """Bytes of a forked process itself. one: the task of its prompts, each as long as the longest of them."""
    reused = _freed(shape, one, "resident") - FREED // 2  # most of a process's freed memory is in the other terms
    there = size_of([*held(shape, "resident"), *found_of_terms(shape, one)]) + reused
    return max(map(size_of, _by_prompt(shape, one, "resident"))) - there + COPIED * structure_bytes(shape)


def _by_prompt(shape: Shape, task: Task, weights: Residence) -> list[Moment]:
    """The moments of each prompt: probes at the output, gradients in a block, readings, and sets of terms."""
    options, longest, streamed = task.pruned, _longest(task), weights == "streamed"
    every, sweep, through = _every(shape, task, weights), _sweep(shape, task, weights), through_block(shape, longest)
    drawing = pulling = every
    if streamed:  # with all prompts side by side, none has these yet
        drawing, pulling = _without(drawing, RESPONSES, READINGS), _without(every, READINGS)
        logits = term("logits for Taylor's criterion", _unmeasured(shape, task))
        drawing, pulling = [*drawing, logits], [*pulling, logits]
    page, head = _page(shape, weights), layer_of(shape) if streamed else []
    vectors = 2 * (options.probes + 1) * shape.stream * sum(_among(task, weights)) * shape.wide
    carried = term("probes on their way back", vectors)
    between, inside = printed_memory(shape, task, streamed=streamed)
    moving = term("sets in a block", inside + _last_layer(shape))
    measured, tried = ablation_bytes(shape, task)
    beside = tried if task.tested_on else measured  # Eq. 16 goes beside the trial on held-out prompts, if there is one
    if _measured_beside(shape, task, weights):
        trying = sweep
    else:
        trying = [*every, _waiting(task, beside, weights), term(SETS_ON_THEIR_WAY, between)]
    return [
        [*drawing, *head, carried, term("probes of the output", _probes(shape, task))],
        [*pulling, *page, carried, through, term("gradients", _gradients(shape, task))],
        [*sweep, *page, through, term("a block's terms", _readings(shape, task))],
        [*trying, *page, through, moving],
        *([max(sweep, trying, key=size_of) + _at_head(shape, task)] if streamed else []),
    ]


def _page(shape: Shape, weights: Residence) -> Moment:
    return page_of(shape) if weights == "streamed" else []


def _unmeasured(shape: Shape, task: Task) -> int:
    """Bytes of the logits of all prompts, kept where the damage is not measured at logits."""
    return 0 if ends_in_logits(shape, task.pruned) else sum(task.chosen_on) * shape.vocabulary * shape.element


def _at_head(shape: Shape, task: Task) -> Moment:
    """Memory when waiting passes come to the layer behind the blocks: the layer, and the output of one pass with all
    its rows, beside the output that it is compared with."""
    tokens = max((*task.chosen_on, *task.tested_on), default=0)
    one = tokens * _ending(shape, task)
    rows = rows_at_once(tokens, one) * one + (max(task.tested_on, default=0) * _ending(shape, task))
    head = layer_of(shape) if ends_in_logits(shape, task.pruned) else []
    stored = sum(one.bytes for one in head if one.what == STORED_BESIDE)  # freed before the passes run
    return [*_without(head, STORED_BESIDE), term("outputs of passes", max(rows * shape.element, stored))]


def _without(moment: Moment, *names: str) -> Moment:
    return [one for one in moment if one.what not in names]


def _every(shape: Shape, task: Task, weights: Residence) -> Moment:
    """The terms that are in memory from the first prompt on until sets are chosen."""
    found = held(shape, weights)
    if weights == "resident":
        found.append(term("values of all blocks, V", len(shape.parts.blocks) * shape.values))
    recorded = sum(recorded_of(shape, _ending(shape, task), n) for n in _among(task, weights))
    kept = _kept(shape, task, weights)
    return [*found, *kept, term("the prompts' own passes", recorded), *found_of_terms(shape, task)]


def _kept(shape: Shape, task: Task, weights: Residence) -> Moment:
    """Memory that libraries keep: code that they load, and freed memory that they do not give back."""
    return [term("batched gradients of torch, loaded", BATCHED), term(REUSED, _freed(shape, task, weights))]


def _freed(shape: Shape, task: Task, weights: Residence) -> int:
    """Bytes that are freed but not given back; more where all weights are in memory, as reusing them is cheaper."""
    if weights == "streamed":  # given back between blocks, once there is so much of it
        waiting = max(ablation_bytes(shape, task))
        return min(FREED // 2 + GROWN, shape.weights + min(waiting, task.waiting))
    freed, (few, many) = min(FREED, shape.weights), OUTPUTS
    outputs = min(few + len(task.chosen_on), many) * _longest(task) * _ending(shape, task) * shape.wide
    gradients = int(GRADIENTS * _gradients(shape, task))
    return freed + max(min(outputs, OUTPUT_BYTES), gradients)


def _sweep(shape: Shape, task: Task, weights: Residence) -> Moment:
    """The terms that are in memory between two blocks, while terms and sets are carried to the last block."""
    followed = followed_terms(terms_of(shape, task.pruned), task.pruned)
    moving = followed * shape.stream * sum(_among(task, weights)) * shape.element
    on_their_way = term("terms on their way to the last block", moving)
    ablations, _ = ablation_bytes(shape, task)
    found = [*_every(shape, task, weights), on_their_way, _waiting(task, ablations, weights)]
    if _measured_beside(shape, task, weights):
        between, _ = printed_memory(shape, task, streamed=True)
        found.append(term(SETS_ON_THEIR_WAY, between))
    return found


def _measured_beside(shape: Shape, task: Task, weights: Residence) -> bool:
    """Whether Eq. 16 is computed in the sweep in which terms are read and all sets measured."""
    return weights == "streamed" and not task.tested_on and not carried(shape, task.pruned).late


def _waiting(task: Task, size: int, weights: Residence) -> MemoryTerm:
    """Memory of waiting passes. size: bytes if all of them waited at the same time."""
    return term("passes without a term", min(task.waiting, size) if weights == "streamed" else 0)


def _among(task: Task, weights: Residence) -> Sequence[int]:
    """Tokens of the prompts that are side by side."""
    return task.chosen_on if weights == "streamed" else (_longest(task),)


def _longest(task: Task) -> int:
    return max(task.chosen_on, default=0)


def found_of_terms(shape: Shape, task: Task) -> list[MemoryTerm]:
    """Results of all prompts, which are kept until sets are chosen; empty where nothing is pruned."""
    if task.pruning is None:
        return []
    every = sum(terms_of(shape, task.pruning).values())
    each = len(task.chosen_on) * every
    return [
        term(NAMES, every * NAME_BYTES),
        term(RESPONSES, each * task.pruning.probes * RESPONSE_BYTES),
        term(READINGS, each * READING_BYTES),
    ]


def terms_of(shape: Shape, options: PruneOptions) -> dict[Kind, int]:
    """How many terms of each kind the model has."""
    a_block: dict[Kind, int] = {
        "neuron": shape.inner, "head": shape.heads, "expert": shape.experts, "ffn": 1, "attention": 1, "block": 1,
    }  # fmt: skip
    return {kind: len(shape.parts.blocks) * a_block[kind] for kind in options.kinds}


def singles(counts: dict[Kind, int], options: PruneOptions) -> int:
    """How many terms are ablated under every prompt."""
    return sum(ablated(kind, count, options.measure) for kind, count in counts.items())


def _ending(shape: Shape, task: Task) -> int:
    """Width of the output at which the damage is measured."""
    return shape.vocabulary if ends_in_logits(shape, task.pruned) else shape.width


def ends_in_logits(shape: Shape, options: PruneOptions) -> bool:
    """Whether the damage is measured at the logits instead of the last hidden states."""
    return options.metric != "hidden" and shape.vocabulary > 0


def _probes(shape: Shape, task: Task) -> int:
    """Bytes of the probes at the output that are drawn at once, for the longest prompt."""
    elements = _longest(task) * _ending(shape, task)
    return (min(task.pruned.probes, probes_at_once(elements)) + PROBABILITIES) * elements * shape.wide


def _gradients(shape: Shape, task: Task) -> int:
    """Bytes of the gradients of those probes that go through a block at once, for the longest prompt."""
    options, tokens = task.pruned, _longest(task)
    sides: dict[Kind, int] = {
        "neuron": shape.inner, "head": shape.heads * shape.head_width, "ffn": shape.width, "attention": shape.width,
    }  # fmt: skip
    captured = tokens * sum(sides.get(kind, 0) for kind in options.kinds)
    size = gradient_elements(shape.stream, tokens, shape.heads, captured) * shape.element
    together = min(options.probes, max(1, GRADIENT_BYTES // max(1, size)))
    inside = INNER_GRADIENTS * max(shape.heads * tokens**2, shape.inner * tokens)
    return together * (captured + inside + STREAM_GRADIENTS * shape.stream * tokens) * shape.wide


def followed_terms(counts: dict[Kind, int], options: PruneOptions) -> int:
    """How many terms are carried to the last block."""
    others = sum(count for kind, count in counts.items() if kind != "neuron")
    sampled = singles(counts, options)
    return max(sampled, others) if others <= CARRIED else sampled


def ablation_bytes(shape: Shape, task: Task) -> tuple[int, int]:
    """Bytes of all ablations under the prompts, and under the held-out ones, if all of them waited at the same time."""
    options, counts = task.pruned, terms_of(shape, task.pruned)
    one = [waiting_bytes(n, shape.stream) for n in task.chosen_on]
    early, late = map(len, orders(counts, options))
    sets = SETS + options.spent.points
    together = sum(one) * max(singles(counts, options) + sets * early, sets * late)
    tried = LEADING + options.spent.tested * (early + late) + rivals(counts, options)
    apart = sum(waiting_bytes(n, shape.stream) for n in task.tested_on) * tried
    return together, apart


def _readings(shape: Shape, task: Task) -> int:
    followed, tokens = followed_terms(terms_of(shape, task.pruned), task.pruned), _longest(task)
    together = min(shape.inner, max(NEURONS_AT_ONCE, tokens))
    values = (NEURONS * together * 8 + shape.inner * shape.wide) * tokens
    return max(replayed(shape, followed, tokens), values + _last_layer(shape) + 8 * _rows(shape))


def _last_layer(shape: Shape) -> int:
    """Bytes of a copy of the weight of an FFN's last layer, needed where its dtype is not the one computed in."""
    return 0 if shape.element == shape.wide else shape.inner * shape.width * shape.wide


def _certified(shape: Shape) -> int:
    attention = DOUBLE_ATTENTION * min(shape.heads * shape.head_width * shape.width, BOUNDED_ENTRIES)
    return 8 * max(_rows(shape), attention)


def _rows(shape: Shape) -> int:
    """How many float64 elements the rows of an FFN's weights take while they are bounded."""
    return DOUBLE_FFN * min(shape.inner, NEURONS_AT_ONCE) * shape.width


def _report(shape: Shape, task: Task) -> int:
    """Bytes for the report's terms, or for the prediction of damage, which takes more with many prompts."""
    every, prompts, probes = sum(terms_of(shape, task.pruned).values()), len(task.chosen_on), task.pruned.probes
    found = prompts * (READING_BYTES + RESPONSE_BYTES * probes)
    return every * (NAME_BYTES + found + max(TERM_BYTES, prompts * PREDICTED_BYTES * probes))


# -- Eq. 16: sets and whole parts on their way through the blocks ---------------------------------


@dataclass(frozen=True)
class Carried:
    """How many vectors per token Eq. 16 carries."""

    parts: int
    """For whole parts: each, and the stream without it."""
    early: int
    """For one set of every order whose sets are chosen by prediction."""
    late: int
    """For one set of every order of whole parts, whose sets are chosen by the measured damage of each part."""

    @property
    def once(self) -> int:
        """Vectors for whole parts and one set of every order."""
        return self.parts + self.early + self.late


def carried(shape: Shape, options: PruneOptions) -> Carried:
    blocks, counts = len(shape.parts.blocks), terms_of(shape, options)
    early, late = (
        sum(printed_vectors(sum(counts[kind] for kind in kinds), blocks) for kinds in some)
        for some in orders(counts, options)
    )
    return Carried(2 * sum(counts.get(kind, 0) for kind in WHOLE), early, late)


def printed_tokens(shape: Shape, task: Task) -> list[int]:
    """Tokens of the prompts on which Eq. 16 is computed."""
    tokens, vectors = task.chosen_on, carried(shape, task.pruned).once
    return [tokens[k] for k in printed_on(tokens, task.pruned.spent.printed, shape.stream, vectors)]


def printed_memory(shape: Shape, task: Task, *, streamed: bool) -> tuple[int, int]:
    """Bytes between two blocks, for all prompts side by side or for the longest, and further bytes in a block.

    Where no set is tried on held-out prompts, likely sets are carried while sets are measured, before any is chosen.
    """
    found, tokens = carried(shape, task.pruned), printed_tokens(shape, task)
    longest, vectors = max(tokens, default=0), found.once
    wanted = found.late or found.early
    if streamed and tokens and wanted and not task.tested_on:
        vectors += (likely_sets(sum(tokens), shape.stream, found.once - wanted, wanted) - 1) * wanted
    size = printed_bytes(sum(tokens) if streamed else longest, shape.stream, vectors)
    return size, replayed(shape, vectors, longest)

"""Memory of `prune-bound`: the moments of its own, beside those of any sweep, and what Eq. 16 carries.

N: tokens; M, F, V: width, longest side of a block's matrices, vocabulary; L: blocks; K: probes. Where all weights are
in memory one prompt goes after the other, else all of them side by side.
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
FREED = 60 << 20  # by earlier prompts, and not given back
OUTPUTS, OUTPUT_BYTES = (6, 16), 144 << 20  # the same, of (N, V): with few prompts and with many; all together at most
GRADIENTS = 0.4  # the same, of the gradients in a block
PROBABILITIES = 3  # (N, V) beside the probes: of the model's output its probabilities, and what is made of them
STREAM_GRADIENTS = 4  # (N, M) of a probe in a block
INNER_GRADIENTS = 3  # (N, F), or (H, N, N), of a probe in a block
NEURONS = 7  # (N, n) in float64 of n neurons: activations, and what the norm on their branch makes of them
DOUBLE_FFN, DOUBLE_ATTENTION = 4, 6  # (n, M) in float64, of what is bounded at once
COPIED = 2  # times the model's structure: what a forked process copies, Python's objects, whose references it counts
SETS = 2  # of each order that are measured under every prompt, beside the points of its curve
TERM_BYTES = 4200  # of a term in the report
NAME_BYTES = 110  # of what says which term it is
READING_BYTES = 220  # of a term under one prompt
RESPONSE_BYTES = 4  # of a probe, a term and a prompt
PREDICTED_BYTES = 16  # the same while damage is predicted: side by side, squared, and in float64


def pruning(shape: Shape, task: Task, weights: Residence) -> list[Moment]:
    """The moments: those of every prompt, certified bounds, the report, and repair."""
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
    """While forked processes have a prompt each, weights in memory: what the one that they come from holds, and theirs.

    What follows, the report above all, is made by that one alone.
    """
    longest, each = sorted(task.chosen_on)[-processes:], -(-len(task.chosen_on) // processes)
    own = sum(_own(shape, replace(task, tokens=(tokens,) * each)) for tokens in longest)
    freed = term(REUSED, min(FREED, shape.weights))
    first = [*held(shape, "resident"), freed, *found_of_terms(shape, task)]
    return [*first, term(SHARING, own)]


def _own(shape: Shape, one: Task) -> int:
    """Bytes of a forked process beside those. one: the task of its prompts, as long as the longest of them."""
    reused = _freed(shape, one, "resident") - FREED // 2  # of what each has of its own, most is in the other terms
    there = size_of([*held(shape, "resident"), *found_of_terms(shape, one)]) + reused
    return max(map(size_of, _by_prompt(shape, one, "resident"))) - there + COPIED * structure_bytes(shape)


def _by_prompt(shape: Shape, task: Task, weights: Residence) -> list[Moment]:
    """What each prompt goes through: probes at the output, gradients in a block, readings, and sets of terms."""
    options, longest, streamed = task.pruned, _longest(task), weights == "streamed"
    every, sweep, through = _every(shape, task, weights), _sweep(shape, task, weights), through_block(shape, longest)
    drawing = pulling = every
    if streamed:  # prompts that are side by side have none of these yet
        drawing, pulling = _without(drawing, RESPONSES, READINGS), _without(every, READINGS)
        logits = term("logits for Taylor's criterion", _unmeasured(shape, task))
        drawing, pulling = [*drawing, logits], [*pulling, logits]
    page, head = _page(shape, weights), layer_of(shape) if streamed else []
    vectors = 2 * (options.probes + 1) * shape.width * sum(_among(task, weights)) * shape.wide
    carried = term("probes on their way back", vectors)
    between, inside = printed_memory(shape, task, streamed=streamed)
    moving = term("sets in a block", inside + _last_layer(shape))
    measured, tried = ablation_bytes(shape, task)
    beside = tried if task.tested_on else measured  # where sets are run on held-out prompts, Eq. 16 goes beside that
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
    """Of the logits of all prompts, where the damage is measured at something else."""
    return 0 if ends_in_logits(shape, task.pruned) else sum(task.chosen_on) * shape.vocabulary * shape.element


def _at_head(shape: Shape, task: Task) -> Moment:
    """Where the passes that wait come to the layer behind the blocks: the layer, and the output of one of them, of as
    many rows as it has, beside that of the pass that it is compared with."""
    tokens = max((*task.chosen_on, *task.tested_on), default=0)
    one = tokens * _ending(shape, task)
    rows = rows_at_once(tokens, one) * one + (max(task.tested_on, default=0) * _ending(shape, task))
    head = layer_of(shape) if ends_in_logits(shape, task.pruned) else []
    stored = sum(one.bytes for one in head if one.what == STORED_BESIDE)  # and no longer there when passes run
    return [*_without(head, STORED_BESIDE), term("outputs of passes", max(rows * shape.element, stored))]


def _without(moment: Moment, *names: str) -> Moment:
    return [one for one in moment if one.what not in names]


def _every(shape: Shape, task: Task, weights: Residence) -> Moment:
    """What is there from the first prompt on until sets are chosen."""
    found = held(shape, weights)
    if weights == "resident":
        found.append(term("values of all blocks, V", len(shape.parts.blocks) * shape.values))
    recorded = sum(recorded_of(shape, _ending(shape, task), n) for n in _among(task, weights))
    kept = _kept(shape, task, weights)
    return [*found, *kept, term("the prompts' own passes", recorded), *found_of_terms(shape, task)]


def _kept(shape: Shape, task: Task, weights: Residence) -> Moment:
    """By the libraries: code that they load, and memory that is freed and that they do not give back."""
    return [term("batched gradients of torch, loaded", BATCHED), term(REUSED, _freed(shape, task, weights))]


def _freed(shape: Shape, task: Task, weights: Residence) -> int:
    """Memory that is freed and not given back; more where all weights are there: it costs less to use it again."""
    if weights == "streamed":  # it is given back between blocks, once there is so much of it
        waiting = max(ablation_bytes(shape, task))
        return min(FREED // 2 + GROWN, shape.weights + min(waiting, task.waiting))
    freed, (few, many) = min(FREED, shape.weights), OUTPUTS
    outputs = min(few + len(task.chosen_on), many) * _longest(task) * _ending(shape, task) * shape.wide
    gradients = int(GRADIENTS * _gradients(shape, task))
    return freed + max(min(outputs, OUTPUT_BYTES), gradients)


def _sweep(shape: Shape, task: Task, weights: Residence) -> Moment:
    """The same between two blocks, while terms and sets are on their way to the last one."""
    followed = followed_terms(terms_of(shape, task.pruned), task.pruned)
    moving = followed * shape.width * sum(_among(task, weights)) * shape.element
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
    """Of passes that would take so many bytes if all of them waited at the same time."""
    return term("passes without a term", min(task.waiting, size) if weights == "streamed" else 0)


def _among(task: Task, weights: Residence) -> Sequence[int]:
    """Tokens of the prompts that are side by side."""
    return task.chosen_on if weights == "streamed" else (_longest(task),)


def _longest(task: Task) -> int:
    return max(task.chosen_on, default=0)


def found_of_terms(shape: Shape, task: Task) -> list[MemoryTerm]:
    """What all prompts give, which is kept until sets are chosen, beside what is; none where nothing is pruned."""
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
    """How many there are of each kind."""
    a_block: dict[Kind, int] = {
        "neuron": shape.inner, "head": shape.heads, "expert": shape.experts, "ffn": 1, "attention": 1, "block": 1,
    }  # fmt: skip
    return {kind: len(shape.parts.blocks) * a_block[kind] for kind in options.kinds}


def singles(counts: dict[Kind, int], options: PruneOptions) -> int:
    """Terms that are ablated under every prompt."""
    return sum(ablated(kind, count, options.measure) for kind, count in counts.items())


def _ending(shape: Shape, task: Task) -> int:
    """Width of the output that the damage is measured at."""
    return shape.vocabulary if ends_in_logits(shape, task.pruned) else shape.width


def ends_in_logits(shape: Shape, options: PruneOptions) -> bool:
    """Whether the damage is measured at the logits, else at the last hidden states."""
    return options.metric != "hidden" and shape.vocabulary > 0


def _probes(shape: Shape, task: Task) -> int:
    """At the output, as many as are drawn at once, of the longest prompt."""
    elements = _longest(task) * _ending(shape, task)
    return (min(task.pruned.probes, probes_at_once(elements)) + PROBABILITIES) * elements * shape.wide


def _gradients(shape: Shape, task: Task) -> int:
    """Of as many probes as go through a block at once, of the longest prompt."""
    options, tokens = task.pruned, _longest(task)
    sides: dict[Kind, int] = {
        "neuron": shape.inner, "head": shape.heads * shape.head_width, "ffn": shape.width, "attention": shape.width,
    }  # fmt: skip
    captured = tokens * sum(sides.get(kind, 0) for kind in options.kinds)
    size = gradient_elements(shape.width, tokens, shape.heads, captured) * shape.element
    together = min(options.probes, max(1, GRADIENT_BYTES // max(1, size)))
    inside = INNER_GRADIENTS * max(shape.heads * tokens**2, shape.inner * tokens)
    return together * (captured + inside + STREAM_GRADIENTS * shape.width * tokens) * shape.wide


def followed_terms(counts: dict[Kind, int], options: PruneOptions) -> int:
    """Terms that are carried to the last block."""
    others = sum(count for kind, count in counts.items() if kind != "neuron")
    sampled = singles(counts, options)
    return max(sampled, others) if others <= CARRIED else sampled


def ablation_bytes(shape: Shape, task: Task) -> tuple[int, int]:
    """Of all ablations under the prompts, and under the held-out ones, if all of them waited at the same time."""
    options, counts = task.pruned, terms_of(shape, task.pruned)
    one = [waiting_bytes(n, shape.width) for n in task.chosen_on]
    early, late = map(len, orders(counts, options))
    sets = SETS + options.spent.points
    together = sum(one) * max(singles(counts, options) + sets * early, sets * late)
    tried = LEADING + options.spent.tested * (early + late) + rivals(counts, options)
    apart = sum(waiting_bytes(n, shape.width) for n in task.tested_on) * tried
    return together, apart


def _readings(shape: Shape, task: Task) -> int:
    followed, tokens = followed_terms(terms_of(shape, task.pruned), task.pruned), _longest(task)
    together = min(shape.inner, max(NEURONS_AT_ONCE, tokens))
    values = (NEURONS * together * 8 + shape.inner * shape.wide) * tokens
    return max(replayed(shape, followed, tokens), values + _last_layer(shape) + 8 * _rows(shape))


def _last_layer(shape: Shape) -> int:
    """The weight of an FFN's last layer, where it is not in the dtype that it is worked on in."""
    return 0 if shape.element == shape.wide else shape.inner * shape.width * shape.wide


def _certified(shape: Shape) -> int:
    attention = DOUBLE_ATTENTION * min(shape.heads * shape.head_width * shape.width, BOUNDED_ENTRIES)
    return 8 * max(_rows(shape), attention)


def _rows(shape: Shape) -> int:
    """Elements in float64 of rows of an FFN's weights."""
    return DOUBLE_FFN * min(shape.inner, NEURONS_AT_ONCE) * shape.width


def _report(shape: Shape, task: Task) -> int:
    """Once damage is predicted, which takes more than the report's terms where prompts are many."""
    every, prompts, probes = sum(terms_of(shape, task.pruned).values()), len(task.chosen_on), task.pruned.probes
    found = prompts * (READING_BYTES + RESPONSE_BYTES * probes)
    return every * (NAME_BYTES + found + max(TERM_BYTES, prompts * PREDICTED_BYTES * probes))


# -- Eq. 16: sets and whole parts on their way through the blocks ---------------------------------


@dataclass(frozen=True)
class Carried:
    """Vectors for every token."""

    parts: int
    """Of whole parts: each, and the stream without it."""
    early: int
    """Of one set of every order, chosen by what is predicted of it."""
    late: int
    """The same of orders of whole parts, chosen by what each of them does alone, once that is measured."""

    @property
    def once(self) -> int:
        """With one set of every order."""
        return self.parts + self.early + self.late


def carried(shape: Shape, options: PruneOptions) -> Carried:
    blocks, counts = len(shape.parts.blocks), terms_of(shape, options)
    early, late = (
        sum(printed_vectors(sum(counts[kind] for kind in kinds), blocks) for kinds in some)
        for some in orders(counts, options)
    )
    return Carried(2 * sum(counts.get(kind, 0) for kind in WHOLE), early, late)


def printed_tokens(shape: Shape, task: Task) -> list[int]:
    """Of the prompts that it is computed on."""
    tokens, vectors = task.chosen_on, carried(shape, task.pruned).once
    return [tokens[k] for k in printed_on(tokens, task.pruned.spent.printed, shape.width, vectors)]


def printed_memory(shape: Shape, task: Task, *, streamed: bool) -> tuple[int, int]:
    """Bytes between two blocks, of all prompts side by side or of the longest, and those more in a block.

    Where no set is tried on held-out prompts, of the sets that are carried while it is measured which are chosen.
    """
    found, tokens = carried(shape, task.pruned), printed_tokens(shape, task)
    longest, vectors = max(tokens, default=0), found.once
    wanted = found.late or found.early
    if streamed and tokens and wanted and not task.tested_on:
        vectors += (likely_sets(sum(tokens), shape.width, found.once - wanted, wanted) - 1) * wanted
    size = printed_bytes(sum(tokens) if streamed else longest, shape.width, vectors)
    return size, replayed(shape, vectors, longest)

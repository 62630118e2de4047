"""Ways to write a checkpoint without a set of terms: what leaves the file, and what is zeroed in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import ModelStructure, probe_trace
from duat_cli.models.edits.heads import HeadLayers, head_layers
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.terms.feedforward import FeedForward, find_feedforward
from duat_cli.models.terms.sites import TermId
from duat_cli.text import one_line, plural


@dataclass(frozen=True)
class Cut:
    """One way to write the set."""

    blocks: tuple[int, ...] = ()
    neurons: tuple[tuple[FeedForward, tuple[int, ...]], ...] = ()
    zeroed: tuple[TermId, ...] = ()
    heads: tuple[tuple[HeadLayers, tuple[int, ...]], ...] = ()
    """Of every attention, as many key and value heads with the heads that use them."""

    @property
    def width(self) -> int:
        return len(self.neurons[0][1]) if self.neurons else 0


def cuts_of(structure: ModelStructure, terms: Sequence[TermId], notes: list[str]) -> list[Cut]:
    """Ways to write the set, the most removed first; the last zeroes everything."""
    everything = tuple(dict.fromkeys(terms))
    blocks = tuple(sorted(t.block for t in everything if t.kind == "block"))
    rest = tuple(t for t in everything if t.block not in blocks)
    heads, others = head_cuts(structure, blocks, rest, notes)
    tried = [Cut(blocks, *_neuron_cuts(structure, blocks, others, notes), heads)]
    if heads:
        tried.append(Cut(blocks, *_neuron_cuts(structure, blocks, rest, [])))
    if tried[0].neurons:
        tried.append(Cut(blocks, (), others, heads))
    if heads and tried[0].neurons:
        tried.append(Cut(blocks, (), rest))
    last = tried[-1]
    return [*tried, *([Cut(zeroed=everything)] if last.blocks or last.neurons or last.heads else [])]


def head_cuts(
    structure: ModelStructure, blocks: Sequence[int], terms: tuple[TermId, ...], notes: list[str]
) -> tuple[tuple[tuple[HeadLayers, tuple[int, ...]], ...], tuple[TermId, ...]]:
    """As many key and value heads of every attention that stays as all of them lose, with the heads that use them; and
    the terms that are left. blocks: those that go."""
    if not any(term.kind == "head" for term in terms):
        return (), terms
    try:
        written, layers = _traced(structure), {}
        for k in range(len(structure.calls)):
            parts = structure.block(k).parts
            if parts.attention and k not in set(blocks):
                layers[k] = head_layers(parts, [c for c in written.attention if c.module in parts.attention])
    except UnsupportedModelError as fault:
        notes.append(f"heads are zeroed: {one_line(str(fault), 300)}")
        return (), terms
    cut = shared_groups({k: (one.heads, one.groups) for k, one in layers.items()}, terms)
    if not cut:
        if any(shared_groups({k: (one.heads, one.groups)}, terms) for k, one in layers.items()):
            notes.append("heads are zeroed: not every attention loses a key and value head with all heads that use it")
        return (), terms
    left = without_heads_of({k: (layers[k].heads // layers[k].groups, numbers) for k, numbers in cut.items()}, terms)
    if any(term.kind == "head" for term in left):
        common = len(next(iter(cut.values())))
        notes.append(f"{common} key and value heads a block are removed with their heads; other heads are zeroed")
    return tuple((layers[k], numbers) for k, numbers in cut.items()), left


def shared_groups(heads: Mapping[int, tuple[int, int]], terms: Sequence[TermId]) -> dict[int, tuple[int, ...]]:
    """Key and value heads of every block, as many of each as all of them lose whole, and never all.

    heads: of every block, (heads, key and value heads).
    """
    whole: dict[int, list[int]] = {}
    for block, (count, groups) in heads.items():
        gone = {term.index for term in terms if term.kind == "head" and term.block == block}
        size = count // groups
        whole[block] = [g for g in range(groups) if gone >= set(range(g * size, (g + 1) * size))]
    most = min((groups - 1 for _, groups in heads.values()), default=0)
    common = min([most, *map(len, whole.values())])
    return {block: tuple(found[:common]) for block, found in whole.items()} if common else {}


def without_heads_of(cut: Mapping[int, tuple[int, Sequence[int]]], terms: Sequence[TermId]) -> tuple[TermId, ...]:
    """The terms that are left once these groups of heads are cut; cut: of every block, the size and the groups."""
    gone = {(k, g * size + i) for k, (size, groups) in cut.items() for g in groups for i in range(size)}
    return tuple(term for term in terms if term.kind != "head" or (term.block, term.index) not in gone)


def _neuron_cuts(
    structure: ModelStructure, blocks: Sequence[int], terms: tuple[TermId, ...], notes: list[str]
) -> tuple[tuple[tuple[FeedForward, tuple[int, ...]], ...], tuple[TermId, ...]]:
    """As many neurons of every FFN that stays as all of them lose; and the terms that are left to be zeroed."""
    if not any(term.kind == "neuron" for term in terms):
        return (), terms
    cut, beyond = shared_neurons(len(structure.calls), blocks, terms)
    if not cut:
        notes.append("neurons are zeroed: a config states one width for all FFNs, and not every FFN loses neurons")
        return (), terms
    try:
        forms = _forms(structure, list(cut))
    except UnsupportedModelError as fault:
        notes.append(f"neurons are zeroed: {one_line(str(fault), 300)}")
        return (), terms
    fewest = min(form.neurons for form in forms.values())
    cut, beyond = shared_neurons(len(structure.calls), blocks, terms, most=fewest - 1)
    if beyond:
        common = len(next(iter(cut.values()), ()))
        notes.append(f"{plural(common, 'neuron')} a block removed; those beyond, up to {beyond} a block, are zeroed")
    # What is zeroed beside it is zeroed in the whole layers; then the layers are cut.
    return tuple((forms[k], numbers) for k, numbers in cut.items()), without_neurons_of(cut, terms)


def shared_neurons(
    depth: int, blocks: Sequence[int], terms: Sequence[TermId], most: int | None = None
) -> tuple[dict[int, tuple[int, ...]], int]:
    """Neurons of every block that stays, as many of each as all of them lose; and the most that a block loses beyond.

    depth: how many blocks there are. blocks: those that go. most: of a block.
    """
    by_block: dict[int, list[int]] = defaultdict(list)
    for term in terms:
        if term.kind == "neuron" and term.index is not None:
            by_block[term.block].append(term.index)
    stay = [k for k in range(depth) if k not in set(blocks)]
    lost = [len(by_block[k]) for k in stay]
    common = min(lost if most is None else [*lost, most], default=0)
    if not common:
        return {}, 0
    return {k: tuple(sorted(by_block[k])[:common]) for k in stay}, max(lost) - common


def without_neurons_of(cut: Mapping[int, Sequence[int]], terms: Sequence[TermId]) -> tuple[TermId, ...]:
    """The terms that are left once these neurons are cut."""
    gone = {TermId("neuron", k, n) for k, numbers in cut.items() for n in numbers}
    return tuple(term for term in terms if term not in gone)


def _forms(structure: ModelStructure, calls: Sequence[int]) -> dict[int, FeedForward]:
    """The one FFN of each of these blocks."""
    written, found = _traced(structure), {}
    for call in calls:
        parts = structure.block(call).parts
        if len(parts.units) != 1:
            raise UnsupportedModelError(f"block {call} has {len(parts.units)} FFNs; one is needed to state its width")
        found[call] = find_feedforward(parts.units[0], written, parts.module)
    return found


def _traced(structure: ModelStructure) -> Trace:
    """UnsupportedModelError where what is cut out of one block would be gone from another."""
    if len(set(structure.calls)) != len(structure.calls):
        raise UnsupportedModelError("blocks share their weights")
    return probe_trace(structure.stack)

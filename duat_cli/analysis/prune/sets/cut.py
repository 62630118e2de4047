"""Ways to write a checkpoint without a set of terms: what leaves the file, and what is zeroed in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure, probe_trace
from duat_cli.models.edits.cutting import Layers
from duat_cli.models.edits.heads import head_layers
from duat_cli.models.edits.neurons import neuron_layers
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.terms.feedforward import find_feedforward
from duat_cli.models.terms.sites import TermId
from duat_cli.text import one_line, plural

Parts = Mapping[int, tuple[int, ...]]
"""Numbers of parts, as of `Layers`, by block."""


@dataclass(frozen=True)
class Cut:
    """One way to write the set."""

    blocks: tuple[int, ...] = ()
    neurons: tuple[tuple[Layers, tuple[int, ...]], ...] = ()
    zeroed: tuple[TermId, ...] = ()
    heads: tuple[tuple[Layers, tuple[int, ...]], ...] = ()
    """Of every attention, as many key and value heads with the heads that use them."""

    @property
    def width(self) -> int:
        return len(self.neurons[0][1]) if self.neurons else 0


def cuts_of(structure: ModelStructure, terms: Sequence[TermId], notes: list[str]) -> list[Cut]:
    """Ways to write the set, the most removed first; the last zeroes everything."""
    everything = tuple(dict.fromkeys(terms))
    blocks = tuple(sorted(t.block for t in everything if t.kind == "block"))
    rest = tuple(t for t in everything if t.block not in blocks)
    heads, others = _head_cuts(structure, blocks, rest, notes)
    tried = [Cut(blocks, *_neuron_cuts(structure, blocks, others, notes), heads)]
    if heads:
        tried.append(Cut(blocks, *_neuron_cuts(structure, blocks, rest, [])))
    if tried[0].neurons:
        tried.append(Cut(blocks, (), others, heads))
    if heads and tried[0].neurons:
        tried.append(Cut(blocks, (), rest))
    last = tried[-1]
    return [*tried, *([Cut(zeroed=everything)] if last.blocks or last.neurons or last.heads else [])]


_Cut = tuple[tuple[tuple[Layers, tuple[int, ...]], ...], tuple[TermId, ...]]
"""Layers with the parts that they lose, as many each, and never all; and the terms that are left to be zeroed."""


def _head_cuts(structure: ModelStructure, blocks: Sequence[int], terms: tuple[TermId, ...], notes: list[str]) -> _Cut:
    """Of every attention that stays. blocks: those that go."""
    if not any(term.kind == "head" for term in terms):
        return (), terms
    try:
        written, layers = _traced(structure), dict[int, Layers]()
        for k in range(len(structure.calls)):
            parts = structure.block(k).parts
            if parts.attention and k not in set(blocks):
                layers[k] = head_layers(parts, written)
    except UnsupportedModelError as fault:
        notes.append(f"heads are zeroed: {one_line(str(fault), 300)}")
        return (), terms
    cut = shared_parts("head", layers, terms)
    if not cut:
        if any(shared_parts("head", {k: one}, terms) for k, one in layers.items()):
            notes.append("heads are zeroed: not every attention loses a key and value head with all heads that use it")
        return (), terms
    left = without_terms("head", layers, cut, terms)
    if any(term.kind == "head" for term in left):
        common = len(next(iter(cut.values())))
        notes.append(f"{common} key and value heads a block are removed with their heads; other heads are zeroed")
    return tuple((layers[k], numbers) for k, numbers in cut.items()), left


def _neuron_cuts(structure: ModelStructure, blocks: Sequence[int], terms: tuple[TermId, ...], notes: list[str]) -> _Cut:
    """Of every FFN that stays."""
    lost = by_block("neuron", terms)
    if not lost:
        return (), terms
    stay = [k for k in range(len(structure.calls)) if k not in set(blocks)]
    if not all(k in lost for k in stay):
        notes.append("neurons are zeroed: a config states one width for all FFNs, and not every FFN loses neurons")
        return (), terms
    try:
        layers = _of_ffns(structure, stay)
    except UnsupportedModelError as fault:
        notes.append(f"neurons are zeroed: {one_line(str(fault), 300)}")
        return (), terms
    cut = shared_parts("neuron", layers, terms)
    common = len(next(iter(cut.values()), ()))
    if cut and (beyond := max(len(lost[k]) for k in stay) - common):
        notes.append(f"{plural(common, 'neuron')} a block removed; those beyond, up to {beyond} a block, are zeroed")
    # What is zeroed beside it is zeroed in the whole layers; then the layers are cut.
    return tuple((layers[k], numbers) for k, numbers in cut.items()), without_terms("neuron", layers, cut, terms)


def by_block(kind: Kind, terms: Sequence[TermId]) -> dict[int, set[int]]:
    """Numbers of the terms of a kind, by block."""
    found: dict[int, set[int]] = defaultdict(set)
    for term in terms:
        if term.kind == kind and term.index is not None:
            found[term.block].add(term.index)
    return found


def shared_parts(kind: Kind, layers: Mapping[int, Layers], terms: Sequence[TermId]) -> Parts:
    """Parts of every one of these layers, as many of each as all of them lose whole, and never all.

    layers: by block.
    """
    gone, whole = by_block(kind, terms), dict[int, list[int]]()
    for block, one in layers.items():
        lost = gone.get(block, set())
        whole[block] = [k for k in range(one.count) if all(k * one.size + i in lost for i in range(one.size))]
    most = min((one.count - 1 for one in layers.values()), default=0)
    common = min([most, *map(len, whole.values())])
    return {block: tuple(found[:common]) for block, found in whole.items()} if common else {}


def without_terms(kind: Kind, layers: Mapping[int, Layers], cut: Parts, terms: Sequence[TermId]) -> tuple[TermId, ...]:
    """The terms that are left once these parts are cut."""
    gone = {(k, part * layers[k].size + i) for k, parts in cut.items() for part in parts for i in range(layers[k].size)}
    return tuple(term for term in terms if term.kind != kind or (term.block, term.index) not in gone)


def _of_ffns(structure: ModelStructure, calls: Sequence[int]) -> dict[int, Layers]:
    """Of the one FFN of each of these blocks."""
    written, found = _traced(structure), dict[int, Layers]()
    for call in calls:
        parts = structure.block(call).parts
        if len(parts.feedforward) != 1:
            count = len(parts.feedforward)
            raise UnsupportedModelError(f"block {call} has {count} FFNs; one is needed to state its width")
        found[call] = neuron_layers(find_feedforward(parts.feedforward[0], written, parts.module))
    return found


def _traced(structure: ModelStructure) -> Trace:
    """UnsupportedModelError where what is cut out of one block would be gone from another."""
    if len(set(structure.calls)) != len(structure.calls):
        raise UnsupportedModelError("blocks share their weights")
    return probe_trace(structure.stack)

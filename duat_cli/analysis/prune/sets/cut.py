"""Ways to write a checkpoint without a set of terms: which terms leave the file, and which are zeroed in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.grouping import by_key
from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.cutting import Cuts, Layers
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.terms.sites import TermId
from duat_cli.text import one_line, plural


@dataclass(frozen=True)
class Cut:
    """One way to write the set."""

    blocks: tuple[int, ...] = ()
    neurons: Cuts = ()
    """Neurons that leave every FFN that stays."""
    heads: Cuts = ()
    """Key and value heads that leave every attention that stays, with the heads that use them."""
    zeroed: tuple[TermId, ...] = ()
    notes: tuple[str, ...] = ()
    """Why heads or neurons are zeroed instead of removed."""

    @property
    def width(self) -> int:
        """Neurons that every FFN loses."""
        return len(self.neurons[0][1]) if self.neurons else 0

    @property
    def groups(self) -> int:
        """Key and value heads that every attention loses."""
        return len(self.heads[0][1]) if self.heads else 0


def cuts_of(
    structure: ModelStructure, parameters: Mapping[nn.Module, BlockParameters], terms: Sequence[TermId]
) -> list[Cut]:
    """Ways to write the set, from most removed to everything zeroed. parameters: of every block."""
    everything = tuple(dict.fromkeys(terms))
    blocks = tuple(sorted(t.block for t in everything if t.kind == "block"))
    rest = tuple(t for t in everything if t.block not in blocks)
    writing = _Writing(structure, parameters, blocks)
    heads, others, of_heads = writing.without("head", rest)
    neurons, zeroed, of_neurons = writing.without("neuron", others)
    # A reason why nothing of a kind is removed holds in every way; what is said of a removal, where it is made.
    reasons = (*(() if heads else of_heads), *(() if neurons else of_neurons))
    tried = [Cut(blocks, neurons, heads, zeroed, (*of_heads, *of_neurons))]
    if heads:
        alone, left, _ = writing.without("neuron", rest)
        tried.append(Cut(blocks, alone, (), left, of_neurons))
    if neurons:
        tried.append(Cut(blocks, (), heads, others, of_heads))
    if heads and neurons:
        tried.append(Cut(blocks, (), (), rest))
    last = tried[-1]
    zeroing = [Cut(zeroed=everything, notes=reasons)] if last.blocks or last.neurons or last.heads else []
    return [*tried, *zeroing]


_Found = tuple[Cuts, tuple[TermId, ...], tuple[str, ...]]
"""The parts that leave; the terms left to be zeroed; notes with the reasons."""


@dataclass(frozen=True)
class _Writing:
    """A model without some whole blocks."""

    structure: ModelStructure
    parameters: Mapping[nn.Module, BlockParameters]
    blocks: tuple[int, ...]

    def without(self, kind: Kind, terms: tuple[TermId, ...]) -> _Found:
        """The parts that can leave every FFN, or every attention, that stays."""
        lost = by_key((term.block, term.index) for term in terms if term.kind == kind)
        if not lost:
            return (), terms, ()
        try:
            layers = self._layers(kind, lost)
            cut, left = _cut(kind, layers, terms)
            if not cut and kind == "head" and any(_cut(kind, {k: one}, terms)[0] for k, one in layers.items()):
                raise UnsupportedModelError("not every attention loses a key and value head with all heads that use it")
        except UnsupportedModelError as fault:
            return (), terms, (f"{kind}s are zeroed: {one_line(str(fault), 300)}",)
        if not any(term.kind == kind for term in left) or not cut:
            return cut, left, ()
        common = len(cut[0][1])
        if kind == "head":
            note = f"{common} key and value heads a block are removed with their heads; other heads are zeroed"
        else:
            beyond = max(map(len, lost.values())) - common
            note = f"{plural(common, 'neuron')} a block removed; those beyond, up to {beyond} a block, are zeroed"
        return cut, left, (note,)

    def _layers(self, kind: Kind, lost: Collection[int]) -> dict[int, Layers]:
        """The layers that hold the terms of a kind, by block. Raises UnsupportedModelError where terms cannot leave.
        lost: blocks that lose some."""
        stay = [k for k in range(len(self.structure.calls)) if k not in self.blocks]
        if kind == "neuron" and not set(stay) <= set(lost):
            raise UnsupportedModelError("a config states one width for all FFNs, and not every FFN loses neurons")
        if len(set(self.structure.calls)) != len(self.structure.calls):
            raise UnsupportedModelError("blocks share their weights")
        found: dict[int, Layers] = {}
        for k in stay:
            parts = self.structure.block(k).parts
            units, held = len(parts.feedforward), self.parameters[parts.module]
            if kind == "head" and not parts.attention:
                continue
            if kind == "neuron" and units != 1:
                raise UnsupportedModelError(f"block {k} has {units} FFNs; one is needed to state its width")
            layers = held.heads if kind == "head" else held.neurons
            if isinstance(layers, str):
                raise UnsupportedModelError(layers)
            found[k] = layers
        return found


def _cut(kind: Kind, layers: Mapping[int, Layers], terms: tuple[TermId, ...]) -> tuple[Cuts, tuple[TermId, ...]]:
    """Parts to cut from each of these layers: from each as many as every layer loses whole, and never all; and the
    terms that are left. Those are zeroed before the layers are cut. layers: by block."""
    gone = {(term.block, term.index) for term in terms if term.kind == kind}

    def of(block: int, part: int) -> set[tuple[int, int | None]]:
        size = layers[block].size
        return {(block, part * size + i) for i in range(size)}

    whole = {k: [part for part in range(one.count) if of(k, part) <= gone] for k, one in layers.items()}
    most = min((one.count - 1 for one in layers.values()), default=0)
    common = min([most, *map(len, whole.values())])
    if not common:
        return (), terms
    leaving = set().union(*(of(k, part) for k, parts in whole.items() for part in parts[:common]))
    left = tuple(term for term in terms if term.kind != kind or (term.block, term.index) not in leaving)
    return tuple((layers[k], tuple(parts[:common])) for k, parts in whole.items()), left

"""Eq. 16 with the model as f, for sets of terms: its bound on the change of the last block's output, and that change.

The paper bounds the effect of removing a set by |Σ removed terms|. Here every term of the set is taken at its own place
and carried to the last block's output through the frozen blocks without the set; within a block this also holds where
one attention follows another. The norm of the sum of these vectors is the bound; the sum of their norms (triangle) is
at least as large. If everything that the input sets is held (H, the scales of norms, routing, gates, and the outputs of
every σ that stays, whose bias the blocks before it set), the removal changes the output by exactly that sum. That
change is also computed a second way: by running the frozen blocks with the whole set removed at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from duat_cli.analysis.prune.terms.frozen import FrozenBlock, Neurons
from duat_cli.errors import needed
from duat_cli.models.arrays import wide
from duat_cli.models.budgets import AT_ONCE, drawn_in_block
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Removal, Removals
from duat_cli.models.terms.sites import Sites, TermId, by_block
from duat_cli.statistics.drawn import Drawn, draw

SEED = 37
Of = TypeVar("Of")  # type of the names of sets


@dataclass(frozen=True)
class Printed:
    """Eq. 16 for one set under one prompt: norms relative to that of the last block's output."""

    bound: float
    triangle: float
    variance: float
    """Variance of the estimate of `triangle`; 0 where every term was carried."""
    held: float
    error: float
    """|output - (output without the set, all held + sum of the carried terms)| / |output|."""


@dataclass
class _Set:
    """State of one set on its way through the blocks. Tensors: (items, N, M)."""

    terms: Mapping[int, list[TermId]]  # by block call
    removals: Removals
    count: int
    generator: torch.Generator  # its own, so that draws do not depend on the sets beside it
    carried: Tensor | None = None  # the sum of its terms, one item
    held: Tensor | None = None  # the stream without its terms
    each: list[Tensor] = field(default_factory=list)  # single terms that were drawn
    drawn: list[Drawn] = field(default_factory=list)  # the draws, in the order of `each`

    @property
    def moving(self) -> list[Tensor]:
        """All that is missing from the stream without the set."""
        return [needed(self.carried), *self.each]


@dataclass(frozen=True)
class _Terms:
    """Some terms of a block."""

    sizes: Tensor
    """Size of each, which sets its chance to be drawn, (terms,)."""
    together: Tensor
    """Contribution of all to the block's output, (1, N, M)."""
    each: Callable[[Tensor], Tensor]
    """Gives the contributions of the terms at some places, (places, N, M)."""


class PrintedReader(Generic[Of]):
    """Computes Eq. 16 for sets in one prompt's sweep; called behind every block."""

    def __init__(
        self,
        sites: Sites,
        sets: Mapping[Of, Sequence[TermId]],
        removals: Mapping[Of, Removals],
        singles: Mapping[TermId, Removal],
        seed: int,
    ) -> None:
        """removals: of every set. singles: of every single term that is no neuron."""
        self._sites, self._singles = sites, singles
        self._sets = {
            of: _Set(by_block(terms), removals[of], len(terms), torch.Generator().manual_seed(SEED + seed))
            for of, terms in sets.items()
        }
        self._output: Tensor | None = None

    def __call__(self, run: BlockRun) -> None:
        block = FrozenBlock(run, self._sites[run.parts.module])
        if self._output is not None and not torch.equal(run.input, self._output):
            added = run.input - self._output  # features of a picture, which the model adds between two blocks
            for one in self._sets.values():
                one.held = None if one.held is None else one.held + added
        self._carry(block)
        alone: dict[TermId, Tensor] = {}
        for one in self._sets.values():
            terms = one.terms.get(run.index)
            if terms:
                self._add(one, block, terms, alone)
        self._output = run.output

    def found(self) -> dict[Of, Printed]:
        """Of every set, behind the last block."""
        whole = wide(needed(self._output)).double()
        size = float(whole.norm())
        results = {}
        for of, one in self._sets.items():
            carried, held = wide(needed(one.carried)).double(), wide(needed(one.held)).double()
            bound = float(carried.norm())
            triangle, variance = bound, 0.0
            if one.each:
                norms = torch.cat([wide(terms).flatten(1).norm(dim=1) for terms in one.each])
                pieces = norms.split([len(drawn.places) for drawn in one.drawn])
                sums = [drawn.total(piece) for drawn, piece in zip(one.drawn, pieces, strict=True)]
                triangle, variance = sum(total for total, _ in sums), sum(var for _, var in sums)
            changed = whole - held
            results[of] = Printed(
                bound / size,
                triangle / size,
                variance / size**2,
                float(changed.norm()) / size,
                float((changed - carried).norm()) / size,
            )
        return results

    def _carry(self, block: FrozenBlock) -> None:
        """Carries every set that has begun through this block without the set's terms there."""
        begun = [one for one in self._sets.values() if one.carried is not None]
        together = [one for one in begun if block.run.index not in one.removals]
        if together:
            block.move([terms for one in together for terms in one.moving])
        for start in range(0, len(together), AT_ONCE):
            some = together[start : start + AT_ONCE]
            held = block.whole(torch.cat([one.held for one in some if one.held is not None]))
            for one, stream in zip(some, held.split(1), strict=True):
                one.held = stream
        for one in begun:
            removal = one.removals.get(block.run.index)
            if removal is not None:
                block.move(one.moving, removal)
                one.held = block.whole(needed(one.held), removal)

    def _add(self, one: _Set, block: FrozenBlock, terms: Sequence[TermId], alone: dict[TermId, Tensor]) -> None:
        """Adds the set's terms in this block. alone: contributions of single terms computed for other sets already."""
        removal = one.removals[block.run.index]
        if one.held is None:
            one.held = block.whole(block.run.input, removal)
        found = self._others(block, terms, removal, alone) + self._neurons(block, terms, removal)
        total = sum((some.together for some in found[1:]), found[0].together)
        one.carried = total if one.carried is None else one.carried + total
        drawn = self._drawn(one, torch.cat([some.sizes for some in found]))
        if drawn is not None:
            places = drawn.places
            for some in found:
                here, places = places[places < len(some.sizes)], places[places >= len(some.sizes)] - len(some.sizes)
                if len(here):
                    one.each.append(some.each(here.to(block.run.input.device)))
            one.drawn.append(drawn)

    def _others(
        self, block: FrozenBlock, terms: Sequence[TermId], removal: Removal, alone: dict[TermId, Tensor]
    ) -> list[_Terms]:
        """The terms that are no neurons."""
        others = [term for term in terms if term.kind != "neuron"]
        parts = []
        for term in others:
            if (behind := self._behind(block, removal, term)) is not None:
                both = replace(behind, masks={**behind.masks, **self._singles[term].masks})
                parts.append(block.whole(block.run.input, behind) - block.whole(block.run.input, both))
                continue
            if term not in alone:
                alone[term] = self._alone(block, term)
            parts.append(alone[term])
        if not others:
            return []
        values = torch.cat(parts)
        return [_Terms(wide(values).flatten(1).norm(dim=1), values.sum(dim=0, keepdim=True), values.__getitem__)]

    def _behind(self, block: FrozenBlock, removal: Removal, term: TermId) -> Removal | None:
        """Removal of the set's terms in a later attention of the same block, which reads the term's attention: the term
        is carried through it without the set, as through the blocks behind. None where there are no such terms."""
        if term.kind not in ("head", "attention") or removal.whole:
            return None
        own, _ = block.sites.find(term)
        every = block.sites.of(term.kind)
        later = every[every.index(own) + 1 :]
        masks = {site: removal.masks[site] for site in later if site in removal.masks and site.module is not own.module}
        return replace(removal, masks=masks) if masks else None

    def _neurons(self, block: FrozenBlock, terms: Sequence[TermId], removal: Removal) -> list[_Terms]:
        """The neurons, one entry for every layer that has some."""
        found = []
        for site in block.sites.of("neuron"):
            places = [t.index - site.offset for t in terms if t.kind == "neuron" and t.index is not None]
            index = torch.tensor([k for k in places if 0 <= k < site.count], device=block.run.input.device)
            if len(index):
                layer = block.neurons(site, removal)

                def each(places: Tensor, layer: Neurons = layer, index: Tensor = index) -> Tensor:
                    return layer.each(index[places])

                found.append(_Terms(layer.sizes[index], layer.together(index), each))
        return found

    def _alone(self, block: FrozenBlock, term: TermId) -> Tensor:
        removal, run = self._singles[term], block.run
        if term.kind == "block":
            return run.output - removal.bridge(run.input)
        return block.whole(run.input) - block.whole(run.input, removal)

    def _drawn(self, one: _Set, sizes: Tensor) -> Drawn | None:
        """The draw of those terms of a block that are carried one by one; None for a set of one term, whose norm is the
        bound, and where all terms are zero."""
        if one.count == 1 or not bool(sizes.any()):
            return None
        return draw(sizes, drawn_in_block(one.count, len(one.terms)) or len(sizes), one.generator)

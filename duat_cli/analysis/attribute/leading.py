"""The leading neurons, experts and heads, those with the largest parts, and what these heads moved between tokens."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from duat_cli.analysis.attribute.parts import BlockParts, Inner
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.sweep.adjoint import BlockAdjoint
from duat_cli.results.attribute import Flow, Move
from duat_cli.statistics.ranking import largest

MOVES = 10  # most moves listed for a head


class Place(NamedTuple):
    """A neuron or expert with both readings of its part."""

    block: int
    unit: int
    number: int  # neurons inside experts are numbered on through all experts of the unit
    total: float
    direct: float

    def within(self, blocks: Sequence[BlockParts]) -> tuple[int | None, int]:
        """For a neuron: the expert that it is in, or None, and its number in that expert or in its unit."""
        inside = blocks[self.block].units[self.unit].in_expert
        return (None, self.number) if inside is None else divmod(self.number, inside)


@dataclass
class Leading:
    """The leading parts of one target, gathered block by block; equal ones keep the order of the model."""

    count: int  # how many neurons and experts are kept
    heads: int  # how many heads are
    places: dict[tuple[str, str], list[Place]] = field(default_factory=lambda: defaultdict(list))
    """Leading places by kind ("neurons", "experts") and reading ("total", "direct")."""
    flows: list[Flow] = field(default_factory=list)

    def add(self, target: int, block: BlockAdjoint, parts: BlockParts) -> None:
        """Adds the parts of one block for the target of that number."""
        for k, unit in enumerate(parts.units):
            for kind, inner in (("neurons", unit.neurons), ("experts", unit.experts)):
                if inner is not None:
                    for reading in ("total", "direct"):
                        known = self.places[kind, reading]
                        self.places[kind, reading] = self._merged(known, parts.number, k, inner, target, reading)
        values = parts.heads[target]
        least = min((abs(flow.moved) for flow in self.flows), default=0.0) if len(self.flows) >= self.heads else -1.0
        for head in largest(values.abs(), self.heads):
            if float(values[head].abs()) >= least:
                moves = head_moves(block, target, head)
                self.flows.append(Flow(block=parts.number, head=head, moved=float(values[head]), moves=moves))
        self.flows = heapq.nsmallest(self.heads, self.flows, key=lambda flow: (-abs(flow.moved), flow.block, flow.head))

    def _merged(
        self, known: list[Place], block: int, unit: int, inner: Inner, target: int, reading: str
    ) -> list[Place]:
        row: Tensor = getattr(inner, reading)[target]
        places = largest(row.abs(), self.count)
        both = zip(places, inner.total[target, places].tolist(), inner.direct[target, places].tolist(), strict=True)
        found = [*known, *(Place(block, unit, place, total, direct) for place, total, direct in both)]
        return heapq.nsmallest(self.count, found, key=lambda place: (-abs(getattr(place, reading)), *place[:3]))


def head_moves(block: BlockAdjoint, target: int, head: int) -> list[Move]:
    """The largest entries of ⟨λ_h[i], H_h[i, j] v_j⟩ for one head. Heads are numbered on through all attention calls of
    the block."""
    for call, gradient in zip(block.run.attention, block.total.heads, strict=True):
        if head < call.rows.heads:
            return _moves(call, gradient[target, 0, :, head].double(), head)
        head -= call.rows.heads
    raise IndexError(head)


def _moves(call: AttentionCall, gradient: Tensor, head: int) -> list[Move]:
    """The moves of one head, none where it reads other vectors. gradient: at H V of this head, (N, d)."""
    if call.value.shape[2] != call.rows.tokens:  # it reads more than the tokens, such as windows of them
        return []
    value = call.value[0, head // (call.rows.heads // call.value.shape[1])].double()  # (N', d)
    found: list[Move] = []
    for rows, weights in call.rows.chunks():
        attention = weights[head].double()
        carried = gradient[rows] @ value.T
        product = attention * carried
        for place in largest(product.abs().flatten(), MOVES):
            i, j = divmod(place, product.shape[1])
            moved, weight, full = (float(x[i, j]) for x in (product, attention, carried))
            found.append(Move(source=j, target=rows.start + i, value=moved, attention=weight, carried=full))
    return [move for move in heapq.nlargest(MOVES, found, key=lambda move: abs(move.value)) if move.value]

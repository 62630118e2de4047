"""Certified bounds: the most that removing a term can change the residual stream at any token, whatever the input.

Bounds are for neurons, heads, experts, FFNs, attention and blocks, each from the weights alone (operators/bounds.py),
where the block's own code shows that the bound applies: a norm feeds the term, and the term reaches the stream as it is
or through a norm. Otherwise there is no bound, and the reason is given.

A bound holds where the term meets the stream. At the model's output no useful bound exists: between the two are
attention, which has no global Lipschitz constant (Kim, Papamakarios & Mnih 2021: dot-product attention), and norms,
whose constant is about max|g| / sqrt(eps), a thousand and more each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.terms.layers import Layers
from duat_cli.compat.libc import give_back_free_pages
from duat_cli.errors import UnsupportedModelError, needed, or_reason
from duat_cli.kinds import KINDS, Kind
from duat_cli.models.arrays import equal
from duat_cli.models.block.norm_scale import ball_of
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.budgets import BOUNDED_ENTRIES
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_inputs
from duat_cli.models.discovery.structure import ModelStructure, run_stack
from duat_cli.models.instrument.tracing import Event, Trace, Tracer
from duat_cli.models.sweep.lockstep import Call, Pass, Visit, Weights
from duat_cli.models.terms.branches import CHANGED, BlockBranches, Branches
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward
from duat_cli.models.terms.inner import Inner, inner_of
from duat_cli.models.terms.sites import BlockSites, Site, Sites
from duat_cli.models.value_path.projections import norm_before, require_averages
from duat_cli.operators.bounds import Ball, head_maximum, row_lengths, spectral_limit
from duat_cli.operators.kronecker import HeadFactors

SHARED = "it adds something to its routed experts that is not bounded here"
ENCODER = "its values are made of the encoder's states, which nothing in the decoder bounds"
NOT_ASKED = "terms of this kind were not asked for"


@dataclass(frozen=True)
class TermBounds:
    """Bounds for the terms of one kind in one place, (count,) float64 each; None with a reason."""

    stream: Tensor | None
    """The most that removing the term changes the residual stream at one token, euclidean norm."""
    vacuous: bool = False
    """Whether `stream` says nothing of the term: it is the most that any change before the branch's norm could do."""
    reason: str | None = None


@dataclass(frozen=True)
class UnitBounds:
    """Bounds for one FFN unit of one block call."""

    module: nn.Module
    down: nn.Module | None
    """The layer that reads the neurons; None where the unit's form is not proved."""
    neurons: TermBounds
    whole: TermBounds
    experts: TermBounds


@dataclass(frozen=True)
class Bound:
    """Bound for one term."""

    value: float | None
    vacuous: bool
    reason: str | None


@dataclass(frozen=True)
class BlockBounds:
    """Bounds for one block call; `units` are in call order."""

    parts: BlockParts
    heads: TermBounds
    attention: TermBounds
    units: tuple[UnitBounds, ...]
    block: TermBounds

    def of(self, sites: BlockSites, kind: Kind) -> list[Bound]:
        """The bounds of all terms of a kind, in the order of the block's sites."""
        if kind == "block":
            return _spelt(self.block, 1)
        return [bound for site in sites.of(kind) for bound in _spelt(self._at(site), site.count)]

    def _at(self, site: Site) -> TermBounds:
        if self.parts.in_cross(site.module):
            return _none(ENCODER)
        if site.kind in ("head", "attention"):
            return self.heads if site.kind == "head" else self.attention
        for unit in self.units:
            if site.kind == "expert" and site.module in set(unit.module.modules()):
                return unit.experts
            if site.module in (unit.module, unit.down):
                return unit.neurons if site.kind == "neuron" else unit.whole
        reason = next((u.neurons.reason for u in self.units if u.neurons.stream is None), None)
        return _none(reason or "its form is not proved")


def _spelt(terms: TermBounds, count: int) -> list[Bound]:
    if terms.stream is None or len(terms.stream) != count:
        return [Bound(None, False, terms.reason or "its terms are counted otherwise")] * count
    return [Bound(value, terms.vacuous, terms.reason) for value in terms.stream.tolist()]


class Certified:
    """The bounds of every block call, from the weights and a trace of a short pass through the model.

    Weights are looked at after the pass, without instruments on the model.
    """

    def __init__(
        self,
        structure: ModelStructure,
        sites: Sites,
        branches: Branches,
        device: str | None = None,
        weights: Weights | None = None,
        kinds: Collection[Kind] = KINDS,
        like: Mapping[str, Tensor] | None = None,
    ) -> None:
        """device, like: as for `probe_inputs`. weights: as for `Visit`. kinds: of the terms that get bounds."""
        given = probe_inputs(structure.stack, like, DISCOVERY_TOKENS, device)

        def forward() -> Any:
            return run_stack(structure.stack, given)

        self._structure, self._sites, self._branches, self._kinds = structure, sites, branches, kinds
        self._written: list[tuple[Event, Trace] | None] = []  # one per block call; None: its bounds are found
        self._balls: dict[tuple[nn.Module, int], Ball] = {}
        self._before: tuple[Tensor, Ball | str] | None = None  # output of the block before, and the ball it lies in
        self._tracer = Tracer(
            structure.stack, structure.elements(), self._write_down, interface=structure.interface, outside=True
        )
        self.passes: list[Pass] = [Call(forward, self._tracer.active), Visit(structure.calls, self._bound, weights)]
        self.bounds: list[BlockBounds] = []

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """The context in which `passes`, and others beside them, are run."""
        return self._tracer.attached()

    def _write_down(self, event: Event, written: Trace) -> None:
        self._written.append((event, written))

    def _bound(self, number: int) -> None:
        (event, written), self._written[number] = needed(self._written[number]), None
        with torch.no_grad():
            inner = inner_of(self._structure, self._sites, written, number)
            width = self._structure.hidden_size // inner.parts.streams
            norms = _Norms(written, self._tracer.outside, self._before, width, self._balls)
            after = inner.parts.hidden.found(event.output, inner.parts.hidden.get(event.args, event.kwargs))
            self._before = after, or_reason(lambda: norms.feeding(after))
            branches = self._branches[inner.parts.module]
            self.bounds.append(_Block(norms, inner, branches, self._kinds).bounds())
        give_back_free_pages()  # rows in float64 leave free pages: 6 MB a block in a model of 135M parameters


@dataclass(frozen=True)
class _Norms:
    """The norms that may feed a block: before all blocks, at the end of the block before, and the block's own."""

    written: Trace  # of this block
    outside: Sequence[Event]  # outside of all blocks
    before: tuple[Tensor, Ball | str] | None
    width: int
    balls: dict[tuple[nn.Module, int], Ball]  # cache of all norms' balls

    def feeding(self, source: Tensor) -> Ball:
        """The ball of the norm whose output this tensor of the trace is. Raises UnsupportedModelError for none."""
        if self.before is not None and equal(self.before[0], source):
            if isinstance(self.before[1], str):
                raise UnsupportedModelError(self.before[1])
            return self.before[1]
        return self.ball(norm_before([*self.outside, *self.written.events], source), source.shape[-1])

    def ball(self, norm: nn.Module, width: int | None = None) -> Ball:
        key = norm, self.width if width is None else width
        if key not in self.balls:
            self.balls[key] = ball_of(*key)
        return self.balls[key]


class _Arrival(NamedTuple):
    """How a branch reaches the stream: ±`factor` times its output, or times its output passed through `norm`."""

    factor: float
    norm: nn.Module | None


@dataclass(frozen=True)
class _Block:
    """One block call, whose `bounds` are to be found."""

    norms: _Norms
    inner: Inner
    branches: BlockBranches
    kinds: Collection[Kind]

    def bounds(self) -> BlockBounds:
        heads, attention = _both(self._heads)
        units = tuple(self._unit(place) for place in range(len(self.inner.units)))
        block = or_reason(lambda: self._whole(attention, units))
        return BlockBounds(self.inner.parts, heads, attention, units, _none(block) if isinstance(block, str) else block)

    def _require(self, *kinds: Kind) -> None:
        """Raises UnsupportedModelError where none of these kinds is asked for."""
        if not set(kinds) & set(self.kinds):
            raise UnsupportedModelError(NOT_ASKED)

    # -- attention ---------------------------------------------------------------------------------------------

    def _heads(self) -> tuple[TermBounds, TermBounds]:
        self._require("head", "attention", "block")
        if self.inner.attention is None:
            raise UnsupportedModelError(str(self.inner.heads))
        arrival = or_reason(lambda: self._arrival(self.inner.last))
        whole = None if isinstance(arrival, str) else self._through_norm(arrival)
        if not isinstance(arrival, str) and whole is not None:  # a norm bounds it whatever the values are
            return self._capped(arrival, self.inner.attention.output.shape[2]), whole
        if isinstance(self.inner.heads, str):
            raise UnsupportedModelError(self.inner.heads)
        if isinstance(arrival, str):
            raise UnsupportedModelError(arrival)
        source, factors = self.inner.heads
        factor = arrival.factor
        require_averages(self.inner.attention)
        heads, values = _by_head(self.norms.feeding(source), factors)
        if not {"attention", "block"} & set(self.kinds):
            return TermBounds(heads * factor), _none(NOT_ASKED)
        # All heads together: σ_max(O) times the norm of the largest values of all heads.
        together = spectral_limit(factors.output.flatten(0, 1)) * float(torch.linalg.vector_norm(values))
        bias = 0.0 if factors.output_bias is None else float(factors.output_bias.double().norm())
        return TermBounds(heads * factor), _one((min(float(heads.sum()), together) + bias) * factor)

    # -- FFN ---------------------------------------------------------------------------------------------------

    def _unit(self, place: int) -> UnitBounds:
        module, form = self.inner.units[place]
        if isinstance(form, Experts):
            experts, whole = _both(lambda: self._experts(self._arrival(self.inner.end(place)), form))
            return UnitBounds(module, None, _none("its neurons belong to routed experts"), whole, experts)
        neurons, whole = _both(lambda: self._neurons(self._arrival(self.inner.end(place)), form))
        if isinstance(form, str):
            return UnitBounds(module, None, neurons, whole, _none(form))
        return UnitBounds(module, form.down, neurons, whole, _none("it routes to no experts"))

    def _neurons(self, arrival: _Arrival, form: FeedForward | str) -> tuple[TermBounds, TermBounds]:
        self._require("neuron", "ffn", "block")
        whole = self._through_norm(arrival)
        if isinstance(form, str):
            return _none(form), whole or _none(form)
        if whole is not None:
            return self._capped(arrival, form.neurons), whole
        ball, layers, columns = self.norms.feeding(form.source), Layers.of(form), form.columns()
        sizes = layers.sizes(ball)
        neurons = sizes.neurons * row_lengths(columns)
        if not {"ffn", "block"} & set(self.kinds):
            return TermBounds(neurons * arrival.factor), _none(NOT_ASKED)
        total = layers.largest(ball, sizes, columns, form.bias)
        return TermBounds(neurons * arrival.factor), _one(total * arrival.factor)

    def _experts(self, arrival: _Arrival, form: Experts) -> tuple[TermBounds, TermBounds]:
        """Bounds for each expert, the largest routing weight times its largest output, and for all together, which are
        a weighted average."""
        whole = self._through_norm(arrival)
        if whole is not None:
            return self._capped(arrival, form.count), whole
        if isinstance(form.routing, str):
            raise UnsupportedModelError(form.routing)
        ball, sizes = self.norms.feeding(form.source), []
        for expert in range(form.count):
            layers = Layers.of_expert(form, expert)
            bias = None if form.bias is None else form.bias[expert]
            sizes.append(layers.largest_of(ball, form.columns[expert], bias))
        experts = torch.tensor(sizes, dtype=torch.float64) * form.routing * abs(form.factor) * arrival.factor
        if not form.complete:
            return TermBounds(experts), _none(SHARED)
        shared = 0.0
        if form.shared is not None:
            shared = Layers.of(form.shared).largest_of(ball, form.shared.columns(), form.shared.bias)
        return TermBounds(experts), _one(float(experts.max()) + shared * arrival.factor)

    # -- block -------------------------------------------------------------------------------------------------

    def _whole(self, attention: TermBounds, units: tuple[UnitBounds, ...]) -> TermBounds:
        """Bound for the block: the sum over its branches if it adds them; if it ends in a norm, the largest norm of its
        input plus that of its output."""
        event, parts = self.inner.event, self.inner.parts
        if not self.branches.through:
            before = parts.hidden.get(event.args, event.kwargs)
            ends = (before, parts.hidden.found(event.output, before))
            return _one(sum(self.norms.feeding(x).largest() for x in ends))
        if parts.cross is not None:
            raise UnsupportedModelError(ENCODER)
        # an attention whose values are handed on is also one of the units
        beside = [unit.whole for unit in units if unit.module not in parts.attention]
        branches = [*([attention] if parts.attention else []), *beside]
        missing = next((t.reason for t in branches if t.stream is None), None)
        if missing is not None:
            raise UnsupportedModelError(missing)
        if self.branches.adds:  # not biases of the branches, which are in the branches' bounds
            raise UnsupportedModelError("it adds something to the stream beside attention and FFN")
        return _one(sum(float(t.stream.sum()) for t in branches if t.stream is not None))

    # -- norms behind a branch ---------------------------------------------------------------------------------

    def _arrival(self, end: nn.Module | str) -> _Arrival:
        """Arrival of the branch that ends in this module. Raises UnsupportedModelError where it is not known; a str for
        `end` is the reason why there is no such module."""
        if isinstance(end, str):
            raise UnsupportedModelError(end)
        branch = next((one for site, one in self.branches.found.items() if site.module is end), None)
        if branch is None:
            raise UnsupportedModelError(CHANGED)
        if isinstance(branch, str):
            raise UnsupportedModelError(branch)
        if isinstance(branch.factor, str):
            raise UnsupportedModelError(branch.factor)
        return _Arrival(branch.factor, branch.norm)

    def _through_norm(self, arrival: _Arrival) -> TermBounds | None:
        """Bound for a branch that ends in a norm, the norm's largest output; None for a branch without a norm."""
        return None if arrival.norm is None else _one(self.norms.ball(arrival.norm).largest() * arrival.factor)

    def _capped(self, arrival: _Arrival, count: int) -> TermBounds:
        """Terms in front of a branch's norm: only what any change there could do."""
        most = self.norms.ball(needed(arrival.norm)).largest_difference() * arrival.factor
        return TermBounds(torch.full((count,), most, dtype=torch.float64), vacuous=True)


def _both(work: Callable[[], tuple[TermBounds, TermBounds]]) -> tuple[TermBounds, TermBounds]:
    found = or_reason(work)
    return (_none(found), _none(found)) if isinstance(found, str) else found


def _none(reason: str) -> TermBounds:
    return TermBounds(None, reason=reason)


def _one(value: float) -> TermBounds:
    return TermBounds(torch.tensor([value], dtype=torch.float64))


def _by_head(ball: Ball, factors: HeadFactors) -> tuple[Tensor, Tensor]:
    """The largest norm of each head's output and of its values, (heads,) each; a few heads at a time in float64."""
    at_once = max(1, BOUNDED_ENTRIES // factors.value[0].numel())
    heads, sizes = [], []
    for some in torch.arange(factors.heads).split(at_once):
        own = some // factors.groups
        value, output = factors.value[own].double(), factors.output[some].double()
        offset = _offsets(ball, value, None if factors.value_bias is None else factors.value_bias[own].double())
        value = ball.directions(value.mT).mT
        heads.append(head_maximum(value, output, offset, ball.radius))
        sizes.append(ball.radius * torch.linalg.matrix_norm(value, 2) + torch.linalg.vector_norm(offset, dim=-1))
    return torch.cat(heads), torch.cat(sizes)


def _offsets(ball: Ball, value: Tensor, bias: Tensor | None) -> Tensor:
    """The part of the values that does not depend on u, V_hᵀ β + p_h, (heads, d)."""
    offset = value.new_zeros(value.shape[0], value.shape[2]) if bias is None else bias
    return offset if ball.bias is None else offset + torch.einsum("kmd,m->kd", value, ball.bias)

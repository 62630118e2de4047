"""Certified bounds: the most that removing a term can change the residual stream at any token, whatever the input.

For neurons, heads, FFNs, attention and blocks, each from the weights alone (operators/bounds.py), where the block's
own code shows that the bound applies: a norm feeds the term, and it reaches the stream as it is, or through a norm.
Otherwise there is no bound, and the reason is said.

A bound holds where the term meets the stream. Carried to the output it would have to pass attention, which has no
global Lipschitz constant (Kim, Papamakarios & Mnih 2021: dot-product attention), and norms, whose constant is about
max|g| / sqrt(eps), a thousand and more each: nothing true that could be said there would exceed triviality.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, tolerance_for, wide
from duat_cli.models.arrival import Arrival, BlockArrivals, block_arrivals
from duat_cli.models.attention import AttentionCall
from duat_cli.models.feedforward import FeedForward, find_feedforward
from duat_cli.models.heads import ValuePath, norm_before, require_averages, value_path
from duat_cli.models.parts import BlockParts
from duat_cli.models.reach import ball_of
from duat_cli.models.rig import BlockRun, hidden_of
from duat_cli.models.sites import BlockSites, Kind, Site
from duat_cli.models.structure import DISCOVERY_TOKENS, ModelStructure, probe_ids, run_stack
from duat_cli.models.tracing import Event, Trace, trace
from duat_cli.operators.bounds import Ball, gated_maximum, head_maximum, plain_maximum, spectral_limit, sum_maximum

T = TypeVar("T")

CHUNK = 1024  # neurons in float64 at once

AT_THE_OUTPUT = (
    "dot-product attention has no global Lipschitz constant, and a norm's is max|g| / sqrt(eps): "
    "a bound carried to the output would exceed what any change could do"
)
ROUTED = "no limit of a routing weight is proved"
REST = "what is left of the branch is rescaled by the norm behind it, so a term may matter more than its size"


@dataclass(frozen=True)
class Terms:
    """Bounds for the terms of one kind in one place, (count,) float64 each; None with a reason."""

    stream: Tensor | None
    """The most that removing the term changes the residual stream, euclidean norm at one token."""
    branch: Tensor | None = None
    """Where a norm stands on the branch: the same in front of that norm."""
    vacuous: bool = False
    """Whether `stream` is no more than what any change in front of that norm could do."""
    reason: str | None = None


@dataclass(frozen=True)
class UnitBounds:
    """One FFN unit of one block call."""

    module: nn.Module
    down: nn.Module | None
    """The layer that reads the neurons, where the unit's form is proved."""
    neurons: Terms
    whole: Terms


@dataclass(frozen=True)
class Bound:
    """One term's bound."""

    value: float | None
    vacuous: bool
    reason: str | None


@dataclass(frozen=True)
class BlockBounds:
    """Everything about one call of a block; `units` in call order."""

    heads: Terms
    attention: Terms
    units: tuple[UnitBounds, ...]
    block: Terms

    def of(self, sites: BlockSites, kind: Kind) -> list[Bound]:
        """The bounds of all terms of a kind, in the order of the block's sites."""
        if kind == "block":
            return _spelt(self.block, 1)
        return [bound for site in sites.of(kind) for bound in _spelt(self._at(site), site.count)]

    def _at(self, site: Site) -> Terms:
        if site.kind in ("head", "attention"):
            return self.heads if site.kind == "head" else self.attention
        if site.kind == "expert":
            return _none(ROUTED)
        for unit in self.units:
            if site.module in (unit.module, unit.down):
                return unit.neurons if site.kind == "neuron" else unit.whole
        unit_reason = next((u.neurons.reason for u in self.units if u.neurons.stream is None), None)
        return _none(unit_reason or "its form is not proved")


def _spelt(terms: Terms, count: int) -> list[Bound]:
    if terms.stream is None or len(terms.stream) != count:
        return [Bound(None, False, terms.reason or "its terms are counted otherwise")] * count
    return [Bound(value, terms.vacuous, terms.reason) for value in terms.stream.tolist()]


def certified_bounds(structure: ModelStructure) -> list[BlockBounds]:
    """One entry a block call, from two short runs of the model and its weights."""
    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)

    def forward() -> Any:
        return run_stack(structure.stack, ids)

    written = trace(structure.stack, forward)
    with torch.no_grad():
        inner = [_inner(structure, written, number) for number in range(len(structure.calls))]
        found: list[BlockArrivals] = []

        def listen(run: BlockRun) -> None:
            known = inner[run.index]
            output = known.path.output.flatten(0, 1) if isinstance(known.path, ValuePath) else None
            found.append(block_arrivals(run, output, known.columns_outside))

        with structure.rig().active() as rig:
            rig.run(forward, listen)
        norms = _Norms(written, structure.hidden_size)
        return [_Block(norms, known, arrivals).bounds() for known, arrivals in zip(inner, found, strict=True)]


@dataclass(frozen=True)
class _Inner:
    """What a block call consists of; a reason in place of what could not be proved."""

    event: Event
    parts: BlockParts
    attention: AttentionCall | None
    path: ValuePath | str
    units: tuple[tuple[nn.Module, FeedForward | str], ...]  # in call order

    def columns_outside(self, place: int) -> Tensor | None:
        """The layer behind a unit, where it stands outside of it."""
        module, form = self.units[place]
        outside = isinstance(form, FeedForward) and form.down not in set(module.modules())
        return form.columns() if outside and isinstance(form, FeedForward) else None


def _inner(structure: ModelStructure, written: Trace, number: int) -> _Inner:
    parts = structure.block(number).parts
    calls = structure.calls
    turn, turns = sum(m is parts.module for m in calls[:number]), sum(m is parts.module for m in calls)
    attention = [c for c in written.attention if c.module in parts.attention]
    each = len(attention) // turns
    path: ValuePath | str = f"it calls attention {each} times; heads are defined for one call"
    if each == 1:
        path = _or_reason(lambda: value_path(parts, written, attention[turn]))
    units = []
    for event in _unit_events(parts, written, turn, turns):
        occurrence = next(k for k, e in enumerate(written.calls(event.module)) if e is event)
        units.append((event.module, _or_reason(lambda e=event, k=occurrence: _form(parts, written, e.module, k))))  # type: ignore[misc]
    event = written.calls(parts.module)[turn]
    return _Inner(event, parts, attention[turn] if each == 1 else None, path, tuple(units))


def _unit_events(parts: BlockParts, written: Trace, turn: int, turns: int) -> list[Event]:
    """The unit calls of one block call, in the order in which they ended."""
    found: list[Event] = []
    for unit in parts.units:
        events = written.calls(unit)
        each = len(events) // turns
        found += events[turn * each : (turn + 1) * each]
    return sorted(found, key=written.events.index)


def _form(parts: BlockParts, written: Trace, unit: nn.Module, occurrence: int) -> FeedForward:
    if unit in parts.mixing:
        raise UnsupportedModelError(f"{type(unit).__name__} mixes tokens without softmax attention")
    return find_feedforward(unit, written, parts.module, occurrence)


def _or_reason(work: Callable[[], T]) -> T | str:
    try:
        return work()
    except UnsupportedModelError as reason:
        return str(reason)


@dataclass(frozen=True)
class _Norms:
    """The norms of the model and the balls of their outputs, each found once."""

    written: Trace
    width: int
    _balls: dict[tuple[nn.Module, int], Ball] = field(default_factory=dict)

    def feeding(self, source: Tensor) -> Ball:
        """The ball of the norm whose output this tensor of the trace is."""
        return self.ball(norm_before(self.written, source), source.shape[-1])

    def ball(self, norm: nn.Module, width: int | None = None) -> Ball:
        key = norm, self.width if width is None else width
        if key not in self._balls:
            self._balls[key] = ball_of(*key)
        return self._balls[key]


@dataclass(frozen=True)
class _Block:
    """One block call on the way to its bounds."""

    norms: _Norms
    inner: _Inner
    arrivals: BlockArrivals

    def bounds(self) -> BlockBounds:
        heads, attention = _both(self._heads)
        units = tuple(self._unit(place) for place in range(len(self.inner.units)))
        block = _or_reason(lambda: self._whole(attention, units))
        return BlockBounds(heads, attention, units, _none(block) if isinstance(block, str) else block)

    # -- attention ---------------------------------------------------------------------------------------------

    def _heads(self) -> tuple[Terms, Terms]:
        path = self.inner.path
        if isinstance(path, str) or self.inner.attention is None:
            raise UnsupportedModelError(str(path))
        arrival = _proved(self.arrivals.attention)
        factor, whole = abs(arrival.factor), self._through_norm(arrival)
        try:
            require_averages(self.inner.attention)
            ball = self.norms.feeding(path.source)
        except UnsupportedModelError as reason:
            return self._capped(arrival, path.output.shape[0], None, str(reason)), whole or _none(str(reason))
        value, output = ball.directions(path.value.double().mT).mT, path.output.double()
        offset = _offsets(ball, path)
        value, offset = (x.repeat_interleave(path.groups, 0) for x in (value, offset))
        heads = head_maximum(value, output, offset, ball.radius)
        if whole is not None:
            return self._capped(arrival, len(heads), heads, REST), whole
        # Together: every head mixes values of its own choice, and O has a largest singular value.
        values = ball.radius * torch.linalg.matrix_norm(value, 2) + torch.linalg.vector_norm(offset, dim=-1)
        together = spectral_limit(output.flatten(0, 1)) * float(torch.linalg.vector_norm(values))
        bias = 0.0 if path.output_bias is None else float(path.output_bias.double().norm())
        return Terms(heads * factor), _one((min(float(heads.sum()), together) + bias) * factor)

    # -- FFN ---------------------------------------------------------------------------------------------------

    def _unit(self, place: int) -> UnitBounds:
        module, form = self.inner.units[place]
        neurons, whole = _both(lambda: self._neurons(_proved(self.arrivals.units[place]), form))
        return UnitBounds(module, None if isinstance(form, str) else form.down, neurons, whole)

    def _neurons(self, arrival: Arrival, form: FeedForward | str) -> tuple[Terms, Terms]:
        whole = self._through_norm(arrival)
        if isinstance(form, str):
            return _none(form), whole or _none(form)
        try:
            ball = self.norms.feeding(form.source)
        except UnsupportedModelError as fault:
            return self._capped(arrival, form.neurons, None, str(fault)), whole or _none(str(fault))
        sizes, columns = neuron_sizes(form, ball), form.columns().double()
        neurons = sizes * torch.linalg.vector_norm(columns, dim=-1)
        if whole is not None:
            return self._capped(arrival, form.neurons, neurons, REST), whole
        bias = 0.0 if form.bias is None else float(form.bias.double().norm())
        total = min(sum_maximum(sizes, columns), together_maximum(form, ball) * spectral_limit(columns)) + bias
        return Terms(neurons * abs(arrival.factor)), _one(total * abs(arrival.factor))

    # -- block -------------------------------------------------------------------------------------------------

    def _whole(self, attention: Terms, units: tuple[UnitBounds, ...]) -> Terms:
        """A block that adds branches: their sum. A block that ends in a norm: the two tokens' largest sizes."""
        event, parts = self.inner.event, self.inner.parts
        if not self.arrivals.through:
            before = parts.hidden.get(event.args, event.kwargs)
            ends = (before, hidden_of(event.output, before))
            return _one(sum(self.norms.feeding(x).largest() for x in ends))
        branches = [*([attention] if parts.attention else []), *(unit.whole for unit in units)]
        missing = next((t.reason for t in branches if t.stream is None), None)
        if missing is not None:
            raise UnsupportedModelError(missing)
        self._require_own_biases()
        return _one(sum(float(t.stream.sum()) for t in branches if t.stream is not None))

    def _require_own_biases(self) -> None:
        """What the block adds beside its branches must be its layers' biases, which the branches' bounds hold."""
        constant = wide(self.arrivals.constant)
        if not bool(constant.any()):
            return
        known = torch.zeros_like(constant[0])
        if isinstance(self.inner.path, ValuePath) and self.inner.path.output_bias is not None:
            known = known + self.inner.path.output_bias
        for place, (_, form) in enumerate(self.inner.units):
            if (
                isinstance(form, FeedForward)
                and form.bias is not None
                and self.inner.columns_outside(place) is not None
            ):
                known = known + form.bias
        if not relative_error(known.expand_as(constant), constant) <= tolerance_for(self.arrivals.constant.dtype):
            raise UnsupportedModelError("it adds something to the stream beside attention and FFN")

    # -- norms behind a branch ---------------------------------------------------------------------------------

    def _through_norm(self, arrival: Arrival) -> Terms | None:
        """A branch that ends in a norm adds no more than the norm's largest output."""
        return None if arrival.norm is None else _one(self.norms.ball(arrival.norm).largest() * abs(arrival.factor))

    def _capped(self, arrival: Arrival, count: int, branch: Tensor | None, reason: str) -> Terms:
        """Terms in front of a branch's norm: at the stream only what any change there could do."""
        if arrival.norm is None:
            return _none(reason)
        most = self.norms.ball(arrival.norm).largest_difference() * abs(arrival.factor)
        return Terms(torch.full((count,), most, dtype=torch.float64), branch, vacuous=True, reason=reason)


def _proved(arrival: Arrival | str) -> Arrival:
    if isinstance(arrival, str):
        raise UnsupportedModelError(arrival)
    return arrival


def _both(work: Callable[[], tuple[Terms, Terms]]) -> tuple[Terms, Terms]:
    found = _or_reason(work)
    return (_none(found), _none(found)) if isinstance(found, str) else found


def _none(reason: str) -> Terms:
    return Terms(None, reason=reason)


def _one(value: float) -> Terms:
    return Terms(torch.tensor([value], dtype=torch.float64))


def _offsets(ball: Ball, path: ValuePath) -> Tensor:
    """What of the values does not depend on u: V_hᵀ β + p_h, (kv_heads, d)."""
    value = path.value.double()
    offset = value.new_zeros(value.shape[0], value.shape[2])
    if path.value_bias is not None:
        offset = offset + path.value_bias.double()
    return offset if ball.bias is None else offset + torch.einsum("kmd,m->kd", value, ball.bias)


def neuron_sizes(form: FeedForward, ball: Ball) -> Tensor:
    """The largest |h_n| over the ball, (n,) float64."""
    up, up_bias = form.rows(form.up)
    gate, gate_bias = (None, None) if form.gate is None else form.rows(form.gate)
    parts = []
    for start in range(0, form.neurons, CHUNK):
        here = slice(start, start + CHUNK)
        b, d = _affine(ball, up[here], None if up_bias is None else up_bias[here])
        if gate is None:
            parts.append(plain_maximum(b, d, ball.radius, form.activation))
        else:
            a, c = _affine(ball, gate[here], None if gate_bias is None else gate_bias[here])
            parts.append(gated_maximum(a, b, c, d, ball.radius, form.activation))
    return torch.cat(parts)


def together_maximum(form: FeedForward, ball: Ball) -> float:
    """The largest |h|, all neurons at once: infinity where no better bound than each neuron's own is known.

    Gated: |h| ≤ max_n |σ(gate_n)| · |up|; plain with |σ(t)| ≤ |t|: |h| ≤ |up|; and |up| ≤ R σ_max(P g W) + |d|.
    """
    rows, bias = form.rows(form.up)
    directions, offsets = _affine(ball, rows, bias)
    up = ball.radius * spectral_limit(directions) + float(torch.linalg.vector_norm(offsets))
    if form.gate is None:
        return up if form.activation.below_identity else math.inf
    gate, gate_bias = form.rows(form.gate)
    return up * float(plain_maximum(*_affine(ball, gate, gate_bias), ball.radius, form.activation).max())


def _affine(ball: Ball, weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    weights = weights.double()
    return ball.directions(weights), ball.offsets(weights, None if bias is None else bias.double())

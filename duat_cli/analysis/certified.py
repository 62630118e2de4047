"""Certified bounds: the most that removing a term can change the residual stream at any token, whatever the input.

For neurons, heads, FFNs, attention and blocks, each from the weights alone (operators/bounds.py), where the block's
own code shows that the bound applies: a norm feeds the term, and it reaches the stream as it is, or through a norm.
Otherwise there is no bound, and the reason is said.

A bound holds where the term meets the stream. Carried to the output it would have to pass attention, which has no
global Lipschitz constant (Kim, Papamakarios & Mnih 2021: dot-product attention), and norms, whose constant is about
max|g| / sqrt(eps), a thousand and more each: nothing true that could be said there would exceed triviality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, tolerance_for, wide
from duat_cli.models.arrival import Arrival, attention_arrival, passes_through, unit_arrival
from duat_cli.models.feedforward import FeedForward, bias_of, find_feedforward
from duat_cli.models.heads import norm_before, require_averages, value_path
from duat_cli.models.reach import ball_of
from duat_cli.models.rig import BlockRun
from duat_cli.models.sites import BlockSites, Kind, Site
from duat_cli.models.structure import DISCOVERY_TOKENS, ModelStructure, probe_ids, run_stack
from duat_cli.models.tracing import Trace, trace
from duat_cli.operators.bounds import (
    Ball,
    ball_maximum,
    gated_maximum,
    head_maximum,
    plain_maximum,
    spectral_limit,
    sum_maximum,
)

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
    """One entry a block call, from one short run of the model and its weights."""
    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)

    def forward() -> Any:
        return run_stack(structure.stack, ids)

    bounds = _Bounds(structure, trace(structure.stack, forward))
    with structure.rig().active() as rig:
        rig.run(forward, bounds.listen)
    return bounds.found


def _none(reason: str) -> Terms:
    return Terms(None, reason=reason)


def _one(value: float) -> Terms:
    return Terms(torch.tensor([value], dtype=torch.float64))


@dataclass
class _Bounds:
    structure: ModelStructure
    written: Trace
    found: list[BlockBounds] = field(default_factory=list)
    _balls: dict[tuple[nn.Module, int], Ball] = field(default_factory=dict)

    def listen(self, run: BlockRun) -> None:
        calls = self.structure.calls
        turn = sum(module is run.parts.module for module in calls[: run.index])  # a shared module runs more than once
        heads, attention = _or_reason(lambda: self._heads(run, turn))
        units = tuple(self._unit_or_reason(run, place, turn) for place in range(len(run.units)))
        block = _or_reason(lambda: (self._block(run, turn, attention, units),) * 2)[0]
        self.found.append(BlockBounds(heads, attention, units, block))

    # -- attention ---------------------------------------------------------------------------------------------

    def _heads(self, run: BlockRun, turn: int) -> tuple[Terms, Terms]:
        if len(run.attention) != 1:
            raise UnsupportedModelError(
                f"it calls attention {len(run.attention)} times; heads are defined for one call"
            )
        calls = [c for c in self.written.attention if c.module is run.attention[0].module]
        call = calls[turn]
        if run.parts.output_source is None:
            raise UnsupportedModelError("no linear layer takes its concatenated heads")
        path = value_path(run.parts, self.written, call)
        arrival = attention_arrival(run, path.output.flatten(0, 1))
        whole = self._through_norm(arrival)
        try:
            require_averages(call)
            ball = self._feeding(path.source)
        except UnsupportedModelError as reason:
            return self._capped(arrival, path.output.shape[0], None, str(reason)), whole or _none(str(reason))
        value, output = path.value.double(), path.output.double()
        offset = _zeros(value, 0, 2) if path.value_bias is None else path.value_bias.double()
        if ball.bias is not None:
            offset = offset + torch.einsum("kmd,m->kd", value, ball.bias)
        value = ball.directions(value.mT).mT.repeat_interleave(path.groups, 0)
        offset = offset.repeat_interleave(path.groups, 0)
        heads = head_maximum(value, output, offset, ball.radius) * abs(arrival.factor)
        if whole is not None:
            return self._capped(arrival, len(heads), heads / abs(arrival.factor), REST), whole
        singular = torch.linalg.svdvals(value)
        rest = torch.linalg.vector_norm(offset, dim=-1)
        values = ball_maximum(singular, torch.zeros_like(singular), torch.zeros_like(rest), ball.radius) + rest
        together = spectral_limit(output.flatten(0, 1)) * float(torch.linalg.vector_norm(values)) * abs(arrival.factor)
        bias = 0.0 if path.output_bias is None else float(path.output_bias.double().norm()) * abs(arrival.factor)
        return Terms(heads), _one(min(float(heads.sum()), together) + bias)

    # -- FFN ---------------------------------------------------------------------------------------------------

    def _unit_or_reason(self, run: BlockRun, place: int, turn: int) -> UnitBounds:
        call = run.units[place]
        form: FeedForward | None = None
        reason = ""
        try:
            form = self._form(run, place, turn)
        except UnsupportedModelError as fault:
            reason = str(fault)
        neurons, whole = _or_reason(lambda: self._unit(run, place, form, reason))
        return UnitBounds(call.module, None if form is None else form.down, neurons, whole)

    def _form(self, run: BlockRun, place: int, turn: int) -> FeedForward:
        module = run.units[place].module
        if module in run.parts.mixing:
            raise UnsupportedModelError(f"{type(module).__name__} mixes tokens without softmax attention")
        before = sum(u.module is module for u in run.units[:place])
        each = sum(u.module is module for u in run.units)
        return find_feedforward(module, self.written, run.parts.module, turn * each + before)

    def _unit(self, run: BlockRun, place: int, form: FeedForward | None, reason: str) -> tuple[Terms, Terms]:
        if form is None:
            return _none(reason), self._through_norm(unit_arrival(run, place, None)) or _none(reason)
        outside = form.down not in set(form.unit.modules())
        columns = form.columns()
        arrival = unit_arrival(run, place, columns if outside else None)
        whole = self._through_norm(arrival)
        try:
            ball = self._feeding(form.source)
        except UnsupportedModelError as fault:
            return self._capped(arrival, form.neurons, None, str(fault)), whole or _none(str(fault))
        sizes = neuron_sizes(form, ball)
        neurons = sizes * torch.linalg.vector_norm(columns.double(), dim=-1)
        if whole is not None:
            return self._capped(arrival, form.neurons, neurons, REST), whole
        bias = 0.0 if form.bias is None else float(form.bias.double().norm())
        total = sum_maximum(sizes, columns.double()) + bias
        return Terms(neurons * abs(arrival.factor)), _one(total * abs(arrival.factor))

    # -- block -------------------------------------------------------------------------------------------------

    def _block(self, run: BlockRun, turn: int, attention: Terms, units: tuple[UnitBounds, ...]) -> Terms:
        """A block that adds branches: their sum. A block that ends in a norm: the two tokens' largest sizes."""
        through, constant = passes_through(run)
        if not through:
            event = self.written.calls(run.parts.module)[turn]
            if event.result is None:
                raise UnsupportedModelError("it gives no hidden states")
            ends = (run.parts.hidden.get(event.args, event.kwargs), event.result)
            return _one(sum(self._feeding(x).largest() for x in ends))
        parts = [*([attention] if run.attention else []), *(unit.whole for unit in units)]
        missing = next((t.reason for t in parts if t.stream is None), None)
        if missing is not None:
            raise UnsupportedModelError(missing)
        self._require_own_biases(run, turn, constant)
        return _one(sum(float(t.stream.sum()) for t in parts if t.stream is not None))

    def _require_own_biases(self, run: BlockRun, turn: int, constant: Tensor) -> None:
        """What the block adds beside its branches must be its layers' biases, which the branches' bounds hold."""
        if not bool(constant.any()):
            return
        known = torch.zeros_like(constant[0])
        if run.parts.output_source is not None and run.attention:
            heads, rank = run.attention[0].output.shape[2:]
            bias = bias_of(run.parts.output_source.linear, heads * rank)
            known = known if bias is None else known + wide(bias)
        for place in range(len(run.units)):
            form = self._form(run, place, turn)
            if form.bias is not None and form.down not in set(form.unit.modules()):
                known = known + wide(form.bias)
        if relative_error(known.expand_as(constant), constant) > 10 * tolerance_for(run.input.dtype):
            raise UnsupportedModelError("it adds something to the stream beside attention and FFN")

    # -- norms -------------------------------------------------------------------------------------------------

    def _feeding(self, source: Tensor) -> Ball:
        return self._ball(norm_before(self.written, source), source.shape[-1])

    def _ball(self, norm: nn.Module, width: int) -> Ball:
        if (norm, width) not in self._balls:
            self._balls[norm, width] = ball_of(norm, width)
        return self._balls[norm, width]

    def _through_norm(self, arrival: Arrival) -> Terms | None:
        """A branch that ends in a norm adds no more than the norm's largest output."""
        if arrival.norm is None:
            return None
        return _one(self._ball(arrival.norm, self.structure.hidden_size).largest() * abs(arrival.factor))

    def _capped(self, arrival: Arrival, count: int, branch: Tensor | None, reason: str) -> Terms:
        """Terms in front of a branch's norm: at the stream only what any change there could do."""
        if arrival.norm is None:
            return _none(reason)
        most = self._ball(arrival.norm, self.structure.hidden_size).largest_difference() * abs(arrival.factor)
        stream = torch.full((count,), most, dtype=torch.float64)
        return Terms(stream, branch, vacuous=True, reason=reason)


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


def _affine(ball: Ball, weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    weights = weights.double()
    return ball.directions(weights), ball.offsets(weights, None if bias is None else bias.double())


def _zeros(value: Tensor, *axes: int) -> Tensor:
    return value.new_zeros([value.shape[axis] for axis in axes])


def _or_reason(work: Callable[[], tuple[Terms, Terms]]) -> tuple[Terms, Terms]:
    try:
        return work()
    except UnsupportedModelError as reason:
        return _none(str(reason)), _none(str(reason))

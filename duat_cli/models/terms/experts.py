"""The inner form of routed experts whose weights stand in fused parameters, (experts, …), as transformers 5 keeps them.

    y = κ Σ_e r_e f_e(z),      f_e(z) = Σ_n σ(gate_en · z + p_en) (up_en · z + q_en) w_en + b_e

Each expert is run alone, by calling the experts module again with all routing on it. Every reading of the parameters
(which one is which, and how gate and up share one) is tried, and the form that gives every expert's own output is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import standing_in
from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.models.arrays import equal, gaussian, relative_error
from duat_cli.models.block.slots import Key, parted, put, taken
from duat_cli.models.instrument.hooks import giving, patched
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.terms.feedforward import FeedForward, evaluate, find_feedforward
from duat_cli.models.terms.sites import Site, watching
from duat_cli.operators.activations import KNOWN, Activation

SEED = 23
TOKENS = 16
SPREAD = 30.0
ALIKE = 2e-5  # tolerance of a form against the module, float32; gelu and its tanh form differ by more
TOLERANCE = 1e-4
SIZES = (0.1, 1.0, 10.0)  # sizes of the vectors on which the router is tried


@dataclass(frozen=True)
class ExpertForm:
    """All experts of one module; weights at least float32, as views of the parameters."""

    module: nn.Module
    source: Tensor  # z, as the trace holds it
    activation: Activation
    gate: Tensor | None  # (E, n, M); None: plain
    up: Tensor  # (E, n, M)
    gate_bias: Tensor | None  # (E, n)
    up_bias: Tensor | None
    columns: Tensor  # w, (E, n, M)
    bias: Tensor | None  # b, (E, M)

    @property
    def count(self) -> int:
        return self.up.shape[0]

    @property
    def neurons(self) -> int:
        """Number of neurons of each expert."""
        return self.up.shape[1]

    def activations(self, expert: int, z: Tensor) -> Tensor:
        """The activations that multiply the columns w_en, z (T, M) to (T, n)."""

        def pre(weights: Tensor, bias: Tensor | None) -> Tensor:
            product = z @ weights[expert].T
            return product if bias is None else product + bias[expert]

        hidden = pre(self.up, self.up_bias)
        return (
            self.activation(hidden) if self.gate is None else self.activation(pre(self.gate, self.gate_bias)) * hidden
        )

    def evaluate(self, expert: int, z: Tensor) -> Tensor:
        """f_e(z) from rows and columns, z (T, M) to (T, M)."""
        y = self.activations(expert, z) @ self.columns[expert]
        return y if self.bias is None else y + self.bias[expert]


@dataclass(frozen=True)
class Columns:
    """The parameter in which an experts module keeps the columns w_en: (E, n, M), or (E, M, n) where it is mirrored."""

    name: str
    mirrored: bool

    @staticmethod
    def of(form: ExpertForm) -> Columns:
        """The columns' parameter in a proved form, whose columns are a view of it."""
        own = form.module.named_parameters(recurse=False)
        name, weight = next((name, p) for name, p in own if p.data_ptr() == form.columns.data_ptr())
        return Columns(name, weight.stride() != form.columns.stride())

    def without(self, module: nn.Module, expert: int, neuron: int) -> contextlib.AbstractContextManager[Any]:
        """While active, calls of the module leave out this neuron: its column is zero in a copy of the weights."""

        def made(module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            weight = module.get_parameter(self.name).detach().clone()
            (weight[expert, :, neuron] if self.mirrored else weight[expert, neuron]).zero_()
            with standing_in(module, self.name, weight):
                return original(*args, **kwargs)

        return patched(module, made)


@dataclass(frozen=True)
class Experts(ExpertForm):
    """All experts of one module, with the rest of their unit."""

    routing: float | str
    """The sum of the routing weights, none of them negative, of every token; or why none is proved."""
    factor: float
    """κ: the factor of the experts' output in the unit's output."""
    shared: FeedForward | None
    """The one FFN that the unit adds for every token, if it adds one."""
    complete: bool
    """Whether the unit's output is experts and shared FFN, and nothing else."""


def expert_form(event: Event, site: Site) -> ExpertForm:
    """The form of the experts at this site, from one call of their module. Raises UnsupportedModelError if unproved."""
    if any(p.dtype not in (torch.float32, torch.float64) for p in site.module.parameters()):
        raise UnsupportedModelError("experts are taken apart from float32 weights; load the model in float32")
    with torch.no_grad():
        asked = _Asked(event, site)
        form = next((form for form in _forms(asked, site) if _gives(form, asked)), None)
    if form is None:
        raise UnsupportedModelError(f"{type(site.module).__name__} is no known activation between two layers")
    return form


def find_experts(unit: nn.Module, site: Site, written: Trace, call: int) -> Experts:
    """The form of the experts at this site in the unit's call `call`. Raises UnsupportedModelError if unproved."""
    events = written.calls(site.module)
    if site.routing is None or len(events) <= call:
        raise UnsupportedModelError("its experts are not called apart from their routing")
    form = expert_form(events[call], site)
    with torch.no_grad():
        unit_event = written.calls(unit)[call]
        routing = or_reason(lambda: _routing_sum(unit_event, site))
        factor, rests = _way_out(unit_event, site)
        shared = _shared(unit_event, written, call, rests)
    complete = shared is not None or not any(bool(rest.any()) for _, rest in rests)
    inner = {field.name: getattr(form, field.name) for field in fields(form)}
    return Experts(**inner, routing=routing, factor=factor, shared=shared, complete=complete)


def source_of(event: Event, site: Site) -> Tensor:
    """The input of the experts in this call, (…, T, M)."""
    return _Asked(event, site).hidden


class _Asked:
    """The experts module, called with all routing on one expert."""

    def __init__(self, event: Event, site: Site) -> None:
        assert site.routing is not None
        self._event, self._routing = event, site.routing
        self._weights = taken(event.args, event.kwargs, site.routing.weights)
        found = [key for key, v in event.slots if v.ndim >= 2 and v is not self._weights]
        if len(found) != 1:
            raise UnsupportedModelError("its experts read more than one stream")
        self._key = found[0]
        self.hidden = taken(event.args, event.kwargs, self._key)
        self.module = event.module

    def __call__(self, expert: int, z: Tensor, size: float = 1.0) -> Tensor:
        """size · f_e(z), z (T, M) to (T, M)."""
        own = self._event.args, self._event.kwargs
        weights = self._weights.new_zeros(len(z), self._weights.shape[1])
        weights[:, 0] = size
        given: dict[Key, Tensor] = {
            self._routing.index: torch.full_like(weights, expert, dtype=taken(*own, self._routing.index).dtype),
            self._routing.weights: weights,
            self._key: z.reshape(*self.hidden.shape[: self.hidden.ndim - 2], len(z), -1),
        }
        args, kwargs = put(*own, given)
        return parted(self.module(*args, **kwargs))[0].reshape(len(z), -1)


def _forms(asked: _Asked, site: Site) -> Iterator[ExpertForm]:
    """Every reading of the parameters whose shapes fit."""
    width = asked.hidden.shape[-1]
    matrices = [p.detach() for p in site.module.parameters(recurse=False) if p.ndim == 3 and len(p) == site.count]
    biases = [p.detach() for p in site.module.parameters(recurse=False) if p.ndim == 2 and len(p) == site.count]
    for down in matrices:
        rest = [m for m in matrices if m is not down]
        for columns in _oriented(down, width):  # (E, n, M)
            neurons = columns.shape[1]
            bias = next((b for b in biases if b.shape[1] == width), None)
            for inputs in _inputs(rest, [b for b in biases if b is not bias], width, neurons):
                for activation in KNOWN:
                    yield ExpertForm(site.module, asked.hidden, activation, *inputs, columns, bias)


def _oriented(matrix: Tensor, width: int) -> Iterator[Tensor]:
    """The matrices as (E, rows, M), in each orientation that fits."""
    if matrix.shape[2] == width:
        yield matrix
    if matrix.shape[1] == width:
        yield matrix.mT


Inputs = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


def _inputs(matrices: list[Tensor], biases: list[Tensor], width: int, neurons: int) -> Iterator[Inputs]:
    def bias(rows: int) -> Tensor | None:
        return next((b for b in biases if b.shape[1] == rows), None)

    if len(matrices) == 1:
        for rows in _oriented(matrices[0], width):
            b = bias(rows.shape[1])
            if rows.shape[1] == neurons:
                yield None, rows, None, b
            elif rows.shape[1] == 2 * neurons:
                halves, pairs = (slice(None, neurons), slice(neurons, None)), (slice(None, None, 2), slice(1, None, 2))
                for first, second in (halves, halves[::-1], pairs, pairs[::-1]):
                    yield rows[:, first], rows[:, second], _at(b, first), _at(b, second)
    elif len(matrices) == 2 and not biases:
        for one, other in (matrices, matrices[::-1]):
            for a in _oriented(one, width):
                for b2 in _oriented(other, width):
                    if a.shape[1] == b2.shape[1] == neurons:
                        yield a, b2, None, None


def _at(bias: Tensor | None, where: slice) -> Tensor | None:
    return None if bias is None else bias[:, where]


def _gives(form: ExpertForm, asked: _Asked) -> bool:
    """Whether the form gives every expert's output. The first test is at large vectors, which tell forms apart best."""
    first = form.up if form.gate is None else form.gate
    z = gaussian((TOKENS, asked.hidden.shape[-1]), asked.hidden, SEED)
    z = z * (SPREAD / float((z @ first[0].T).abs().max().clamp_min(1e-30)))
    for expert in range(form.count):
        for vectors in (z, gaussian(tuple(z.shape), z, SEED + 1 + expert)):
            if not relative_error(form.evaluate(expert, vectors), asked(expert, vectors)) <= ALIKE:
                return False
    whole = asked(0, z)
    return relative_error(asked(0, z, size=0.37), 0.37 * whole) <= TOLERANCE  # the weight acts on the output


def _routing_sum(unit: Event, site: Site) -> float:
    """The sum of the routing weights at every token, for any input of the unit; a little above the measured one."""
    seen: list[Tensor] = []
    with watching([site], lambda _, value, __: seen.append(value.detach().double())):
        for k, size in enumerate(SIZES):
            unit.again(size * gaussian(tuple(unit.tensors[0].shape), unit.tensors[0], SEED + 100 + k))
    sums = torch.cat([value.sum(dim=-1).flatten() for value in seen])
    top = float(sums.max())
    if min(float(v.min()) for v in seen) < 0 or not float(sums.min()) >= top * (1 - 1e-5):
        raise UnsupportedModelError("its routing weights do not sum to the same at every token: no limit is proved")
    return top * (1 + 1e-6)


def _way_out(unit: Event, site: Site) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """κ, and the rest of the unit's output beside κ times its experts, as (input, rest) for some inputs."""

    def with_experts(x: Tensor, value: Tensor) -> Tensor:
        with giving([site.module], lambda tensor: value.reshape(tensor.shape).clone()):
            return unit.again(x).double()

    x = unit.tensors[0]
    factors: list[float] = []
    rests: list[tuple[Tensor, Tensor]] = []
    for k, size in enumerate(SIZES):
        tokens = size * gaussian(tuple(x.shape), x, SEED + 200 + k)
        noise = gaussian(tuple(x.shape), x, SEED + 300 + k)
        base = with_experts(tokens, torch.zeros_like(noise))
        moved = (with_experts(tokens, noise) - base).reshape(-1)
        sent = noise.double().reshape(-1)
        factor = (moved @ sent) / (sent @ sent)
        if not relative_error(factor * sent, moved) <= TOLERANCE:
            raise UnsupportedModelError("its experts' output does not reach the unit's as it is")
        factors.append(float(factor))
        rests.append((tokens, base))
    if max(factors) - min(factors) > TOLERANCE * max(map(abs, factors)):
        raise UnsupportedModelError("its experts' output is scaled by what the unit reads")
    return max(factors, key=abs) * (1 + 1e-6), rests


def _shared(unit: Event, written: Trace, call: int, rests: list[tuple[Tensor, Tensor]]) -> FeedForward | None:
    """The FFN inside the unit whose output is the whole rest, on every one of these inputs; None without one."""
    for module in unit.module.children():
        with contextlib.suppress(UnsupportedModelError):
            form = find_feedforward(module, written, unit.module, call)
            made = ((evaluate(form, x).double(), rest) for x, rest in rests)
            if equal(form.source, unit.tensors[0]) and all(relative_error(y, rest) <= TOLERANCE for y, rest in made):
                return form
    return None

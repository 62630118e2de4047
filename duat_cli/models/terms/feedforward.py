"""The inner form of an FFN: an activation between two linear layers, gated or plain.

    gated:  y = Σ_n σ(gate_n · z + p_n) (up_n · z + q_n) w_n + b        plain:  y = Σ_n σ(up_n · z + q_n) w_n + b

The form is found by what the modules do on vectors that are fed to them, however the weights are stored or fused, and
wherever the unit that discovery found begins and ends (some models keep the linear layers outside it). It is proved by
comparing its output, from the rows and columns found, with the model's own on new vectors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import equal, gaussian, relative_error, wide
from duat_cli.models.block.linears import bias_of, has_matrix, matrix_of, wide_twin
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.operators.activations import Activation, recognise

SEED = 5
TOKENS = 24
SPREAD = 40.0  # largest pre-activation aimed at, where activations differ clearly
ALIKE = 3e-5  # activation against formula, relative, in float32
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Rows:
    """The output features of a linear layer that make one vector of pre-activations, neuron by neuron."""

    linear: nn.Module
    index: Tensor  # (n,)

    def taken(self, features: Tensor) -> Tensor:
        """The entries of these features among those of all, (C, …) to (n, …); a view where they lie side by side."""
        first, count = int(self.index[0]), self.index.numel()
        if torch.equal(self.index, torch.arange(first, first + count)):
            return features[first : first + count]
        return features[self.index.to(features.device)]


@dataclass(frozen=True)
class FeedForward:
    """The form of an FFN: the modules and features that hold its pieces."""

    unit: nn.Module
    source: Tensor  # z, the input of the first linear layers, as the trace holds it
    activation: Activation
    gate: Rows | None  # None: plain
    up: Rows  # the pre-activation of a plain FFN, the linear factor of a gated one
    down: nn.Module  # reads the n activations
    bias: Tensor | None  # b, (M,)

    @property
    def neurons(self) -> int:
        return self.up.index.numel()

    @property
    def read(self) -> tuple[Rows, ...]:
        """The rows behind σ and its factor: gate, if there is one, and up."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        """The layers that hold the neurons' rows, each once."""
        return tuple(dict.fromkeys(rows.linear for rows in self.read))

    def columns(self) -> Tensor:
        """w, (n, M) in the layer's dtype, at least float32."""
        return matrix_of(self.down, self.neurons)

    def rows(self, which: Rows) -> tuple[Tensor, Tensor | None]:
        """Weights (n, M) and biases (n,) of these rows, at least float32."""
        width = self.source.shape[-1]
        matrix, bias = matrix_of(which.linear, width).T, bias_of(which.linear, width)
        return which.taken(matrix), None if bias is None else which.taken(bias)


def find_feedforward(unit: nn.Module, written: Trace, inside: nn.Module, call: int = 0) -> FeedForward:
    """The form of one unit of the block `inside` in call number `call`. Raises UnsupportedModelError if it has none."""
    calls = written.calls(unit)
    if len(calls) <= call or calls[call].result is None or not calls[call].tensors:
        raise UnsupportedModelError(f"{type(unit).__name__} has no single input and output")
    span = _span(calls[call], written, inside)
    twins = _Twins(span)
    with torch.no_grad(), twins.listening():
        return _recognised(span, twins)


# -- the modules from the FFN's input to its output ------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """A unit with the linear layers directly in front of it and behind it, where it holds no such layers itself."""

    unit: Event
    front: nn.Module | None
    behind: nn.Module | None
    source: Tensor


def _span(unit: Event, written: Trace, inside: nn.Module) -> _Span:
    """The span of a unit, from the trace: with a layer in front where no layer inside reads its input, and one behind
    where no layer inside makes its output."""
    own, x = set(unit.module.modules()), unit.tensors[0]
    assert unit.result is not None
    leaves = [e for e in written.events if e.result is not None and e.tensors and has_matrix(e.module)]
    held = [e for e in leaves if e.module in own and e.module is not unit.module]
    near = [e for e in leaves if e.module in set(inside.modules()) - own]
    front = behind = None
    source = x
    if not any(equal(e.tensors[0], x) for e in held):
        maker = next((e for e in near if equal(e.result, x)), None)
        if maker is None:
            raise UnsupportedModelError(f"{type(unit.module).__name__} reads no linear layer and is fed by none")
        front, source = maker.module, maker.tensors[0]
    if not any(equal(e.result, unit.result) for e in held):
        reader = next((e for e in near if equal(e.tensors[0], unit.result)), None)
        if reader is None:
            raise UnsupportedModelError(
                f"{type(unit.module).__name__}'s output is not made by one linear layer of its neurons"
            )
        behind = reader.module
    return _Span(unit, front, behind, source)


class _Twins:
    """The span's modules in at least float32, to be run on any z; inputs and outputs of their layers are recorded."""

    def __init__(self, span: _Span) -> None:
        self._span = span
        self.front, self.behind = (None if m is None else wide_twin(m) for m in (span.front, span.behind))
        self.unit = wide_twin(span.unit.module)
        names = dict(span.unit.module.named_modules())
        # twin -> the model's own module
        self.own = {twin: names[name] for name, twin in self.unit.named_modules()}
        for twin, module in ((self.front, span.front), (self.behind, span.behind)):
            if twin is not None and module is not None:
                self.own[twin] = module
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """While active, calls of the layers are recorded in `calls`."""
        modules = {*self.unit.modules(), self.front, self.behind}
        return hooked([m for m in modules if m is not None and has_matrix(m)], after=self._heard)

    def _heard(self, module: nn.Module, args: Sequence[object], kwargs: object, output: object) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            self.calls.append((module, args[0], output))

    def run(self, z: Tensor) -> Tensor:
        """The FFN's output (1, n, M) for z (1, n, M)."""
        self.calls.clear()
        output = self._span.unit.again(z if self.front is None else self.front(z), self.unit)
        return output if self.behind is None else self.behind(output)


# -- recognition -----------------------------------------------------------------------------------------------


def _recognised(span: _Span, twins: _Twins) -> FeedForward:
    name = type(span.unit.module).__name__
    z = _noise(span, SEED)
    try:
        twins.run(z)
    except (RuntimeError, ValueError, TypeError, LookupError) as fault:  # it may read a mask of the model's own tokens
        raise UnsupportedModelError(f"{name} does not run on other vectors than its block's tokens") from fault
    # without what is the same for all vectors: beside one large bias all else would be taken too near to 0
    moved = (out - out.mean(dim=-2, keepdim=True) for _, x, out in twins.calls if equal(x, z))
    spread = max((float(one.abs().max()) for one in moved), default=0.0)
    if not spread > 0:
        raise UnsupportedModelError(f"{name}: its first layers give nothing")
    z = z * (SPREAD / spread)
    y = twins.run(z)
    readers = [(module, out) for module, x, out in twins.calls if equal(x, z)]
    last = next(((module, x) for module, x, out in reversed(twins.calls) if equal(out, y)), None)
    if last is None or not readers or any(module is last[0] for module, _ in readers):
        raise UnsupportedModelError(f"{name} is no activation between linear layers")
    down, hidden = last
    for gate, up in _splits(readers, hidden.shape[-1]):
        pre = _taken(readers, up if gate is None else gate)
        factor = None if gate is None else _taken(readers, up)
        activation = recognise(pre, hidden, factor, ALIKE)
        if activation is not None:
            own = [None if rows is None else Rows(twins.own[rows.linear], rows.index) for rows in (gate, up)]
            bias = bias_of(down, hidden.shape[-1])
            assert own[1] is not None
            found = FeedForward(span.unit.module, span.source, activation, own[0], own[1], twins.own[down], bias)
            _prove(found, span, twins)
            return found
    raise UnsupportedModelError(
        f"{name}: what its last layer reads is no known activation of what its first layers give"
    )


def _splits(readers: list[tuple[nn.Module, Tensor]], neurons: int) -> Iterator[tuple[Rows | None, Rows]]:
    """Every way in which the readers' features may be one pre-activation per neuron, or a gate and a factor."""
    pieces: list[Rows] = []
    for module, out in readers:
        width = out.shape[-1]
        if width == neurons:
            pieces.append(Rows(module, torch.arange(neurons)))
        elif width == 2 * neurons:
            halves, pairs = torch.arange(width).reshape(2, neurons), torch.arange(width).reshape(neurons, 2).T
            for first, second in (halves, halves.flip(0), pairs, pairs.flip(0)):
                yield Rows(module, first), Rows(module, second)
    if len(pieces) == 1:
        yield None, pieces[0]
    yield from permutations(pieces, 2)


def _taken(readers: list[tuple[nn.Module, Tensor]], rows: Rows) -> Tensor:
    out = next(out for module, out in readers if module is rows.linear)
    return out[..., rows.index.to(out.device)]


def _noise(span: _Span, seed: int) -> Tensor:
    return gaussian((1, TOKENS, span.source.shape[-1]), wide(span.source), seed)


def _prove(found: FeedForward, span: _Span, twins: _Twins) -> None:
    """Compares the sum over neurons with the model's own FFN, on new vectors of three sizes."""
    vectors = [_noise(span, SEED + k) * size for k, size in enumerate((0.3, 1.0, 6.0), start=1)]
    for z, got in zip(vectors, evaluate(found, torch.cat(vectors)).split(1), strict=True):  # weights are read once
        error = relative_error(got, twins.run(z))
        if not error <= TOLERANCE:
            raise UnsupportedModelError(
                f"{type(found.unit).__name__}: its neurons do not add up to its output (relative error {error:.1e})"
            )


def evaluate(found: FeedForward, z: Tensor) -> Tensor:
    """The FFN's output from its rows and columns, neuron by neuron: z (…, M) to (…, M)."""

    def pre(rows: Rows) -> Tensor:
        weight, bias = found.rows(rows)
        product = z @ weight.to(z.dtype).T
        return product if bias is None else product + bias.to(z.dtype)

    hidden = (
        found.activation(pre(found.up)) if found.gate is None else found.activation(pre(found.gate)) * pre(found.up)
    )
    y = hidden @ found.columns().to(z.dtype)
    return y if found.bias is None else y + found.bias.to(z.dtype)

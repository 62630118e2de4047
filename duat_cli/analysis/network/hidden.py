"""The FFN of one layer as two linear layers around σ, token by token: what W'_{j,2} and W'_{j,3} are made of.

A gated FFN has two pre-activations a neuron, so its σ is a function of two numbers, σ(gate) ∘ up. Routed experts are
the FFN of the token's own k experts, k n neurons, whose router weights r are dynamic parameters and stand in the second
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.routers import Routed
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward, Rows
from duat_cli.operators.activations import Activation

FUDGE = 1 + 1e-6  # what a bound adds to the factor behind experts, and rounding may leave of 1


@dataclass(frozen=True)
class Sigma:
    """σ of one layer."""

    activation: Activation
    gated: bool
    neurons: int  # of one token: n, or k n
    experts: int | None = None  # k

    @property
    def rows(self) -> int:
        """Pre-activations of one token."""
        return self.neurons * (2 if self.gated else 1)

    def __call__(self, a: Tensor) -> Tensor:
        """(N rows,), a token's gates in front of its ups, to (N neurons,)."""
        a = a.reshape(-1, self.rows // self.neurons, self.neurons)
        h = self.activation(a[:, 0])
        return (h * a[:, 1] if self.gated else h).reshape(-1)


@dataclass(frozen=True)
class Hidden:
    """σ between two linear layers; T is 1 where every token has the same weights, else N."""

    sigma: Sigma
    first: Tensor | None  # (T, rows, width of the unit's input); None: the unit reads the pre-activations
    first_bias: Tensor | None  # (T, rows)
    last: Tensor | None  # (T, neurons, width of the unit's output); None: the unit gives the neurons
    last_bias: Tensor | None  # (T, width)

    def pre_activation(self, z: Tensor) -> Tensor:
        """What σ reads where the unit reads z: (N, width) to (N, rows)."""
        a = z if self.first is None else torch.einsum("trw,tw->tr", self.first.expand(len(z), -1, -1), z)
        return a if self.first_bias is None else a + self.first_bias

    def output(self, h: Tensor) -> Tensor:
        """What the unit gives for these neurons: (N, neurons) to (N, width)."""
        y = h if self.last is None else torch.einsum("tnw,tn->tw", self.last.expand(len(h), -1, -1), h)
        return y if self.last_bias is None else y + self.last_bias


def hidden_of(form: FeedForward | Experts, unit: nn.Module, routed: Routed | None) -> Hidden:
    """Of the form that was found of a unit; routed: what the router gave for this prompt, of experts."""
    if isinstance(form, FeedForward):
        return _feedforward(form, unit)
    if routed is None:
        raise UnsupportedModelError("what its router gave was not seen")
    return _experts(form, routed)


def places_of(form: FeedForward, unit: nn.Module) -> tuple[nn.Module, ...]:
    """The layers inside the unit whose outputs are its pre-activations; none where the unit reads them."""
    inside = set(unit.modules())
    return tuple(linear for linear in form.linears if linear in inside)


def own_pre_activation(form: FeedForward, unit_input: Tensor, outputs: dict[nn.Module, Tensor]) -> Tensor:
    """What the model's own layers gave to σ, (N, rows). outputs: of the layers inside the unit."""
    return torch.cat([_taken(rows, outputs.get(rows.linear, unit_input)) for rows in form.read], dim=-1)


def _taken(rows: Rows, features: Tensor) -> Tensor:
    features = features.reshape(-1, features.shape[-1])
    return features[:, rows.index.to(features.device)]


def _feedforward(form: FeedForward, unit: nn.Module) -> Hidden:
    inside, parts = set(unit.modules()), form.read
    sigma = Sigma(form.activation, form.gate is not None, form.neurons)
    first = first_bias = last = last_bias = None
    if form.up.linear in inside:
        found = [form.rows(rows) for rows in parts]
        first = torch.cat([weight for weight, _ in found])[None]
        if any(bias is not None for _, bias in found):
            zero = first.new_zeros(form.neurons)
            first_bias = torch.cat([zero if bias is None else bias for _, bias in found])[None]
    else:
        index = torch.cat([rows.index for rows in parts])
        if not torch.equal(index, torch.arange(len(index))):
            first = torch.eye(len(index))[index][None]
    if form.down in inside:
        last = form.columns()[None]
        last_bias = None if form.bias is None else form.bias[None]
    return Hidden(sigma, first, first_bias, last, last_bias)


def _experts(form: Experts, routed: Routed) -> Hidden:
    if not form.complete:
        raise UnsupportedModelError("beside its experts it adds something that is no FFN of the same input")
    chosen, count = routed.experts.long(), routed.experts.shape[1]
    factor = form.factor / FUDGE
    weights = routed.weights * (1.0 if abs(factor - 1) < FUDGE - 1 else factor)  # r, (N, k)

    def of_tokens(stored: Tensor) -> Tensor:
        """(E, n, …) to (N, k n, …)."""
        return stored[chosen].flatten(1, 2)

    first, biases = [of_tokens(form.up)], [form.up_bias]
    if form.gate is not None:
        first, biases = [of_tokens(form.gate), *first], [form.gate_bias, *biases]
    last = (form.columns[chosen] * weights[..., None, None].to(form.columns)).flatten(1, 2)
    first_biases = [f.new_zeros(f.shape[:2]) if b is None else of_tokens(b) for f, b in zip(first, biases, strict=True)]
    last_bias = None if form.bias is None else (form.bias[chosen] * weights[..., None].to(form.bias)).sum(dim=1)
    if form.shared is not None:
        shared = _feedforward(form.shared, form.shared.unit)
        if (shared.sigma.gated, shared.sigma.activation) != (form.gate is not None, form.activation):
            raise UnsupportedModelError("its shared expert has another activation than its routed ones")
        assert shared.first is not None
        assert shared.last is not None
        parts = shared.first.expand(len(chosen), -1, -1).chunk(len(first), dim=1)
        first = [torch.cat(both, dim=1) for both in zip(first, parts, strict=True)]
        more = torch.zeros(1, shared.sigma.rows).to(last) if shared.first_bias is None else shared.first_bias
        halves = more.expand(len(chosen), -1).chunk(len(first), dim=1)
        first_biases = [torch.cat(both, dim=1) for both in zip(first_biases, halves, strict=True)]
        last = torch.cat([last, shared.last.expand(len(chosen), -1, -1)], dim=1)
        if shared.last_bias is not None:
            last_bias = shared.last_bias if last_bias is None else last_bias + shared.last_bias
    sigma = Sigma(form.activation, form.gate is not None, last.shape[1], count)
    return Hidden(sigma, torch.cat(first, dim=1), torch.cat(first_biases, dim=1), last, last_bias)

"""One layer as the paper's general term (Eq. 20, 31), written out from what the model's own block does to unit vectors.

    x'_j = (W'_{j,1} x'_{j-1} + b'_{j,3}) + W'_{j,3} σ(W'_{j,2} x'_{j-1} + b'_{j,2})

with every dynamic parameter frozen. W'_{j,1} is the frozen block without its FFN: attention, residual paths and norms.
Every column is a replay of the model's own code, so that nothing here depends on the architecture.

The FFN is two linear layers around σ, token by token. A gated FFN has two pre-activations per neuron, so its σ is a
function of two numbers, σ(gate) ∘ up. With routed experts, a token's FFN is that of its own k experts, with k n
neurons; their router weights r are dynamic parameters and are part of the second layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routed
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward, Rows
from duat_cli.operators.activations import Activation

ITEM_ELEMENTS = 1 << 19  # elements of the unit vectors that are replayed at once
FUDGE = 1 + 1e-6  # margin that bounds add to the factor behind experts, and rounding error of a factor of 1


@dataclass(frozen=True)
class Sigma:
    """σ of one layer."""

    activation: Activation
    gated: bool
    neurons: int  # per token: n, or k n
    experts: int | None = None  # k

    @property
    def rows(self) -> int:
        """How many pre-activations a token has."""
        return self.neurons * (2 if self.gated else 1)

    def __call__(self, a: Tensor) -> Tensor:
        """Applies σ: (N rows,), each token's gates before its ups, to (N neurons,)."""
        a = a.reshape(-1, self.rows // self.neurons, self.neurons)
        h = self.activation(a[:, 0])
        return (h * a[:, 1] if self.gated else h).reshape(-1)


@dataclass(frozen=True)
class Hidden:
    """σ between two linear layers; T is 1 if every token has the same weights, otherwise N."""

    sigma: Sigma
    first: Tensor | None  # (T, rows, width of the unit's input); None: the unit reads the pre-activations
    first_bias: Tensor | None  # (T, rows)
    last: Tensor | None  # (T, neurons, width of the unit's output); None: the unit's output are the neurons
    last_bias: Tensor | None  # (T, width)

    def pre_activation(self, z: Tensor) -> Tensor:
        """Input of σ, (N, rows), for the unit's input z, (N, width)."""
        a = z if self.first is None else torch.einsum("trw,tw->tr", self.first.expand(len(z), -1, -1), z)
        return a if self.first_bias is None else a + self.first_bias

    def output(self, h: Tensor) -> Tensor:
        """Output of the unit, (N, width), for neurons h, (N, neurons)."""
        y = h if self.last is None else torch.einsum("tnw,tn->tw", self.last.expand(len(h), -1, -1), h)
        return y if self.last_bias is None else y + self.last_bias


def hidden_of(form: FeedForward | Experts, unit: nn.Module, routed: Routed | None) -> Hidden:
    """The layers of a unit by its form. routed: the router's output for this prompt, if the unit holds experts."""
    if isinstance(form, FeedForward):
        return _feedforward(form, unit)
    if routed is None:
        raise UnsupportedModelError("what its router gave was not seen")
    return _experts(form, routed)


def places_of(form: FeedForward, unit: nn.Module) -> tuple[nn.Module, ...]:
    """The layers inside the unit whose outputs are its pre-activations; empty where the unit reads pre-activations."""
    inside = set(unit.modules())
    return tuple(linear for linear in form.linears if linear in inside)


def own_pre_activation(form: FeedForward, unit_input: Tensor, outputs: dict[nn.Module, Tensor]) -> Tensor:
    """Input of σ as the model's own layers computed it, (N, rows). outputs: of the layers inside the unit."""
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
        """Stored weights of all experts, (E, n, …), to those of each token's own experts, (N, k n, …)."""
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
        parts = needed(shared.first).expand(len(chosen), -1, -1).chunk(len(first), dim=1)
        first = [torch.cat(both, dim=1) for both in zip(first, parts, strict=True)]
        more = torch.zeros(1, shared.sigma.rows).to(last) if shared.first_bias is None else shared.first_bias
        halves = more.expand(len(chosen), -1).chunk(len(first), dim=1)
        first_biases = [torch.cat(both, dim=1) for both in zip(first_biases, halves, strict=True)]
        last = torch.cat([last, needed(shared.last).expand(len(chosen), -1, -1)], dim=1)
        if shared.last_bias is not None:
            last_bias = shared.last_bias if last_bias is None else last_bias + shared.last_bias
    sigma = Sigma(form.activation, form.gate is not None, last.shape[1], count)
    return Hidden(sigma, torch.cat(first, dim=1), torch.cat(first_biases, dim=1), last, last_bias)


# -- the layer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """The original parameters of one layer, for row-major vec; side is N M."""

    W1: Tensor  # (side, side)
    b3: Tensor  # (side,)
    hidden: Hidden | None = None  # None: the layer has no FFN, and what follows is empty
    W2: Tensor | None = None  # (N rows, side)
    b2: Tensor | None = None  # (N rows,)
    W3: Tensor | None = None  # (side, N neurons)


def layer_of(run: BlockRun, hidden: Hidden | None, tick: Callable[[int], None]) -> Layer:
    """The layer of one block under one prompt. hidden: its FFN, whose unit is called once. tick: is called with the
    number of vectors done."""
    tokens, width = run.input.shape[1:]
    side = tokens * width
    base = run.replay(torch.zeros_like(run.input))
    b3, W1 = base.end.reshape(-1), run.input.new_empty(side, side)
    z0 = base.unit_inputs[0][0] if hidden is not None else None  # input of the unit, (N, its width)
    Z = None if z0 is None else z0.new_empty(z0.numel(), side)
    step = max(1, ITEM_ELEMENTS // side)
    for start in range(0, side, step):
        here = slice(start, min(start + step, side))
        count = here.stop - start
        items = run.input.new_zeros(count, side)
        items[torch.arange(count), start + torch.arange(count)] = 1.0
        replay = run.replay(items.reshape(count, tokens, width))
        W1[:, here] = (replay.end - base.end).reshape(count, -1).T
        if Z is not None and z0 is not None:
            Z[:, here] = (replay.unit_inputs[0] - z0).reshape(count, -1).T
        tick(here.stop)
    if hidden is None or Z is None or z0 is None:
        return Layer(W1, b3)
    W3, of_bias = _reaching(run, hidden, base)
    if hidden.first is None:
        W2 = Z
    else:
        first = hidden.first.to(Z).expand(tokens, -1, -1)
        W2 = (first @ Z.reshape(tokens, -1, side)).reshape(-1, side)
    return Layer(W1, b3 + of_bias, hidden, W2, hidden.pre_activation(z0).reshape(-1), W3)


def _reaching(run: BlockRun, hidden: Hidden, base: Replay) -> tuple[Tensor, Tensor]:
    """W'_{j,3}, the unit's last layer followed by the block's map of the unit's output; and the image of its bias."""
    tokens, side = run.input.shape[1], run.input.numel()
    arriving = _arriving(run, base)  # (N, width of the unit's output, N M)
    last = arriving if hidden.last is None else hidden.last.to(arriving).expand(tokens, -1, -1) @ arriving
    if hidden.last_bias is None:
        of_bias = run.input.new_zeros(side)
    else:
        of_bias = torch.einsum("tw,tws->s", hidden.last_bias.to(arriving).expand(tokens, -1), arriving)
    return last.reshape(-1, side).T.contiguous(), of_bias


def _arriving(run: BlockRun, base: Replay) -> Tensor:
    """Image in the block's output of each unit vector of the unit's output, (N, width, N M)."""
    tokens, side = run.input.shape[1], run.input.numel()
    like = run.units[0].output
    width = like.shape[-1]
    found = like.new_zeros(tokens, width, side)
    if run.parts.arrives:
        places = torch.arange(side)
        found[places // width, places % width, places] = 1.0
        return found
    total = tokens * width
    step = max(1, ITEM_ELEMENTS // max(side, total))
    for start in range(0, total, step):
        count = min(step, total - start)
        given = like.new_zeros(count, total)
        given[torch.arange(count), start + torch.arange(count)] = 1.0
        zero = torch.zeros_like(run.input).expand(count, -1, -1)
        output = run.replay(zero, [given.reshape(count, *like.shape)]).end
        found.view(total, side)[start : start + count] = (output - base.end).reshape(count, -1)
    return found

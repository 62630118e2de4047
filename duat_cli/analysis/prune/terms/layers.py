"""How large an FFN or an expert can get over all outputs of the norm in front of it, from its own layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.models.sweep.budgets import NEURONS_AT_ONCE
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward
from duat_cli.operators.activations import Activation
from duat_cli.operators.bounds import Ball, gated_maximum, plain_maximum, spectral_limit, sum_maximum


@dataclass(frozen=True)
class Layers:
    """What makes the activations of one FFN or expert: σ(gate · z + p) (up · z + q), or σ(up · z + q)."""

    activation: Activation
    gate: tuple[Tensor, Tensor | None] | None  # (n, M), (n,)
    up: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, form: FeedForward) -> Layers:
        return cls(form.activation, None if form.gate is None else form.rows(form.gate), form.rows(form.up))

    @classmethod
    def of_expert(cls, form: Experts, expert: int) -> Layers:
        def one(weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return weights[expert], None if bias is None else bias[expert]

        gate = None if form.gate is None else one(form.gate, form.gate_bias)
        return cls(form.activation, gate, one(form.up, form.up_bias))

    def neuron_sizes(self, ball: Ball) -> Tensor:
        """The largest |h_n| over the ball, (n,) float64."""
        parts = []
        for here in self._pieces():
            b, d = _affine(ball, *self.up, here)
            if self.gate is None:
                parts.append(plain_maximum(b, d, ball.radius, self.activation))
            else:
                a, c = _affine(ball, *self.gate, here)
                parts.append(gated_maximum(a, b, c, d, ball.radius, self.activation))
        return torch.cat(parts)

    def _pieces(self) -> list[slice]:
        """Neurons that are in float64 at once."""
        return [slice(start, start + NEURONS_AT_ONCE) for start in range(0, len(self.up[0]), NEURONS_AT_ONCE)]

    def largest(self, ball: Ball, sizes: Tensor, columns: Tensor, bias: Tensor | None) -> float:
        """A bound on ‖Σ_n h_n w_n + b‖ over the ball; sizes: of each neuron, columns: w, (n, M) in any dtype."""
        total = min(sum_maximum(sizes, columns), self._together(ball) * spectral_limit(columns))
        return total + (0.0 if bias is None else float(bias.double().norm()))

    def largest_of(self, ball: Ball, form: FeedForward) -> float:
        """The same for a whole FFN."""
        return self.largest(ball, self.neuron_sizes(ball), form.columns(), form.bias)

    def _together(self, ball: Ball) -> float:
        """The largest |h|, all neurons at once: infinity where no better bound than each neuron's own is known.

        Gated: |h| ≤ max_n |σ(gate_n)| · |up|; plain with |σ(t)| ≤ |t|: |h| ≤ |up|; and |up| ≤ R σ_max(P g W) + |d|.
        """
        offsets = torch.cat([_affine(ball, *self.up, here)[1] for here in self._pieces()])
        limit = spectral_limit(self.up[0], lambda rows: ball.directions(rows.double()))
        up = ball.radius * limit + float(torch.linalg.vector_norm(offsets))
        if self.gate is None:
            return up if self.activation.below_identity else math.inf
        gates = (_affine(ball, *self.gate, here) for here in self._pieces())
        return up * max(float(plain_maximum(*gate, ball.radius, self.activation).max()) for gate in gates)


def _affine(ball: Ball, weights: Tensor, bias: Tensor | None, here: slice) -> tuple[Tensor, Tensor]:
    """Directions (n, M) and offsets (n,) of these rows over the ball, in float64."""
    weights = weights[here].double()
    return ball.directions(weights), ball.offsets(weights, None if bias is None else bias[here].double())

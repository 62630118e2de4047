"""Bounds on the output of an FFN or an expert over all outputs of the norm in front of it, from its own layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.models.budgets import NEURONS_AT_ONCE
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward
from duat_cli.operators.activations import Activation
from duat_cli.operators.bounds import Ball, gated_maximum, plain_maximum, spectral_limit, sum_maximum


@dataclass(frozen=True)
class Sizes:
    """Bounds on the activations h over a ball."""

    neurons: Tensor
    """The largest |h_n| of each neuron, (n,) float64."""
    offset: float
    """|q|, with q the part of `up · z + q` that does not depend on the ball's vector."""
    share: float
    """Bound on |h| / |up · z + q|; infinity where none is known."""


@dataclass(frozen=True)
class Layers:
    """First layers of an FFN or expert, with activations σ(gate · z + p) (up · z + q), or σ(up · z + q)."""

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

    def sizes(self, ball: Ball) -> Sizes:
        """Bounds on the activations over the ball; a few neurons at a time in float64.

        Gated: |h| ≤ max_n |σ(gate_n)| · |up|; plain with |σ(t)| ≤ |t|: |h| ≤ |up|.
        """
        parts, offsets = [], []
        share = 0.0 if self.gate is not None else 1.0 if self.activation.below_identity else math.inf
        for start in range(0, len(self.up[0]), NEURONS_AT_ONCE):
            here = slice(start, start + NEURONS_AT_ONCE)
            b, d = _affine(ball, *self.up, here)
            offsets.append(d)
            if self.gate is None:
                parts.append(plain_maximum(b, d, ball.radius, self.activation))
            else:
                a, c = _affine(ball, *self.gate, here)
                parts.append(gated_maximum(a, b, c, d, ball.radius, self.activation))
                share = max(share, float(plain_maximum(a, c, ball.radius, self.activation).max()))
        return Sizes(torch.cat(parts), float(torch.linalg.vector_norm(torch.cat(offsets))), share)

    def largest(self, ball: Ball, sizes: Sizes, columns: Tensor, bias: Tensor | None) -> float:
        """A bound on ‖Σ_n h_n w_n + b‖ over the ball; columns: w, (n, M) in any dtype. |up| ≤ R σ_max(P g W) + |q|."""
        together = math.inf
        if math.isfinite(sizes.share):
            limit = spectral_limit(self.up[0], lambda rows: ball.directions(rows.double()))
            together = sizes.share * (ball.radius * limit + sizes.offset)
        total = sum_maximum(sizes.neurons, columns, together)
        return total + (0.0 if bias is None else float(bias.double().norm()))

    def largest_of(self, ball: Ball, columns: Tensor, bias: Tensor | None) -> float:
        """The bound `largest`, with the sizes of the activations computed here."""
        return self.largest(ball, self.sizes(ball), columns, bias)


def _affine(ball: Ball, weights: Tensor, bias: Tensor | None, here: slice) -> tuple[Tensor, Tensor]:
    """Directions (n, M) and offsets (n,) of these rows over the ball, in float64."""
    weights = weights[here].double()
    return ball.directions(weights), ball.offsets(weights, None if bias is None else bias[here].double())

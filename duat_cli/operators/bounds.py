"""Upper bounds over all inputs on the size of the contribution of a neuron, a head or a branch.

A norm leaves every token in a ball: its output is g ∘ u + β with |u| ≤ R, and u without a mean for LayerNorm
(RMSNorm and LayerNorm: R = √M, approached as the token outgrows the norm's eps). All bounds below are maxima over
that ball, in float64, and true upper bounds: never below the maximum, at most a little above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.operators.activations import Activation

Rows = Callable[[Tensor], Tensor]
CELLS = 512  # cells of the search over one angle; the bound is above the maximum by about π / CELLS, relative
BISECTIONS = 60
CHUNK = 1 << 21  # entries worked on at once
ROUNDING = 1 + 1e-9  # factor for the rounding of float64 sums, so that bounds stay true
ROWS = 1024  # rows of a matrix converted to float64 at once
SPECTRAL_SIDE = 1536  # above it σ_max is bounded by the Frobenius norm: eigenvalues would cost too much


@dataclass(frozen=True)
class Ball:
    """All outputs of one norm: y = g ∘ u + β, |u| ≤ radius, Σ u = 0 if centred."""

    gain: Tensor  # g, (M,) float64
    bias: Tensor | None  # β, (M,) float64
    centered: bool
    radius: float

    def directions(self, weights: Tensor) -> Tensor:
        """The vector that multiplies u in w·y: P (g ∘ w) for every row w of `weights` (n, M)."""
        rows = weights * self.gain
        return rows - rows.mean(dim=-1, keepdim=True) if self.centered else rows

    def offsets(self, weights: Tensor, bias: Tensor | None) -> Tensor:
        """The part of w·y + p that does not depend on u: w·β + p, (n,), for every row w of `weights` (n, M)."""
        offset = weights.new_zeros(weights.shape[0]) if bias is None else bias
        return offset if self.bias is None else offset + weights @ self.bias

    def largest(self) -> float:
        """max ‖y‖ over the ball: the most that a branch that ends in this norm can add. RMSNorm: R max|g|."""
        along = torch.zeros_like(self.gain) if self.bias is None else self.bias
        return float(ball_maximum(self.gain.abs(), along, along.new_zeros(()), self.radius))

    def largest_difference(self) -> float:
        """max ‖y - y'‖ over the ball, at most 2 R max|g|: the most that a change in front of this norm can do."""
        return 2 * self.radius * float(self.gain.abs().max()) * ROUNDING


# -- neurons -------------------------------------------------------------------------------------------------


def product_maximum(a: Tensor, b: Tensor, radius: float) -> Tensor:
    """max over |u| ≤ R of |(a·u)(b·u)| = R² (|a||b| + |a·b|) / 2, row by row: a, b (n, M) to (n,).

    The product is uᵀ(abᵀ + baᵀ)u / 2, whose nonzero eigenvalues are (a·b ± |a||b|) / 2.
    """
    lengths = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return radius**2 * (lengths + (a * b).sum(dim=-1).abs()) / 2


def gated_maximum(a: Tensor, b: Tensor, c: Tensor, d: Tensor, radius: float, activation: Activation) -> Tensor:
    """max over |u| ≤ R of |σ(a·u + c) (b·u + d)|, row by row: a, b (n, M), c, d (n,) to (n,).

    With s = R sin θ the coordinate of u along a, the gate depends on θ alone, and the other factor is at most
    |d + κ s| + |b⊥| R cos θ with κ = a·b/|a|. Each cell of θ is bounded by the largest gate times the largest other
    factor in it. Without offsets and with |σ(t)| ≤ |t| the closed form of `product_maximum` holds as well.
    """
    angles = torch.linspace(-math.pi / 2, math.pi / 2, CELLS + 1, dtype=a.dtype, device=a.device)
    step = max(1, CHUNK // CELLS)
    parts = []
    for start in range(0, len(a), step):
        here = slice(start, start + step)
        parts.append(_gated_part(a[here], b[here], c[here], d[here], radius, activation, angles))
    bound = torch.cat(parts) if parts else a.new_zeros(0)
    if activation.below_identity:
        plain = (c == 0) & (d == 0)
        bound = torch.where(plain, torch.minimum(bound, product_maximum(a, b, radius)), bound)
    return bound * ROUNDING


def _gated_part(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, radius: float, activation: Activation, angles: Tensor
) -> Tensor:
    length = torch.linalg.vector_norm(a, dim=-1)
    along = (a * b).sum(dim=-1) / length.clamp_min(torch.finfo(a.dtype).tiny)  # κ
    across = (b.square().sum(dim=-1) - along.square()).clamp_min(0).sqrt()  # |b⊥|
    place = radius * angles.sin()  # s at the cells' ends
    gate = c[:, None] + length[:, None] * place
    other = (d[:, None] + along[:, None] * place).abs()
    # cos is largest at the end nearer to 0; the two cells that meet there have 1.
    cosine = radius * torch.maximum(angles[:-1].cos(), angles[1:].cos())
    sizes = activation.maximum(gate[:, :-1], gate[:, 1:])
    others = torch.maximum(other[:, :-1], other[:, 1:]) + across[:, None] * cosine
    return (sizes * others).amax(dim=-1)


def plain_maximum(a: Tensor, c: Tensor, radius: float, activation: Activation) -> Tensor:
    """max over |u| ≤ R of |σ(a·u + c)|: the largest |σ| on [c - R|a|, c + R|a|], row by row: (n, M), (n,) to (n,)."""
    reach = radius * torch.linalg.vector_norm(a, dim=-1)
    return activation.maximum(c - reach, c + reach) * ROUNDING


# -- affine maps of the ball ---------------------------------------------------------------------------------


def ball_maximum(singular: Tensor, along: Tensor, rest: Tensor, radius: float) -> Tensor:
    """max over |w| ≤ R of sqrt(Σ_i (σ_i w_i + k_i)² + rest²): the largest size of an affine map over the ball.

    singular, along: (..., r), the map's singular values and its offset in the basis of left singular vectors;
    rest: (...), the size of the offset outside that basis. For every λ > σ_1²

        max² ≤ λ R² + Σ_i k_i² λ / (λ - σ_i²) + rest²        (Lagrange duality; equality at the best λ)

    so the bound is true for any λ that the bisection ends at.
    """
    top = singular.amax(dim=-1)
    offset = torch.linalg.vector_norm(along, dim=-1)
    high = (top * offset / radius).clamp_min(1e-300) if radius > 0 else torch.full_like(top, math.inf)
    low = torch.minimum(high, 1e-13 * top.square() + 1e-300)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()  # of λ - σ_1², in logarithms
        pull = (along * singular / (middle[..., None] + _gap(singular, top))).square().sum(dim=-1)
        rising = pull < radius**2  # the dual rises: its minimum lies below
        low, high = torch.where(rising, low, middle), torch.where(rising, middle, high)
    level = (high + top.square())[..., None]
    dual = level[..., 0] * radius**2 + (along.square() * level / (high[..., None] + _gap(singular, top))).sum(dim=-1)
    simple = radius * top + (offset.square() + rest.square()).sqrt()
    bound = torch.where(torch.isfinite(dual), (dual + rest.square()).clamp_min(0).sqrt(), torch.inf)
    return torch.minimum(bound, simple) * ROUNDING


def _gap(singular: Tensor, top: Tensor) -> Tensor:
    return (top[..., None] - singular) * (top[..., None] + singular)


def head_maximum(value: Tensor, output: Tensor, offset: Tensor, radius: float) -> Tensor:
    """max over |u| ≤ R of ‖O_hᵀ (V_hᵀ u + p_h)‖ for every head, (heads,).

    value: (heads, M, d), acting on u (gain and projection inside); output: (heads, d, M); offset: p, (heads, d).
    A head whose attention rows are nonnegative and sum to at most 1 adds a convex combination of such vectors and of
    zero, so it never adds more, and attains it where a row picks one token. σ_max(V O) by two thin QR factorisations.
    """
    _, right = torch.linalg.qr(value)  # V = Q R, (heads, d, d)
    basis, left = torch.linalg.qr(output.mT)  # Oᵀ = Q L
    _, singular, rows = torch.linalg.svd(right @ left.mT)
    added = torch.einsum("hd,hdm->hm", offset, output)
    along = torch.einsum("hrk,hmk,hm->hr", rows, basis, added)
    rest = (added.square().sum(dim=-1) - along.square().sum(dim=-1)).clamp_min(0).sqrt()
    return ball_maximum(singular, along, rest, radius)


def spectral_limit(matrix: Tensor, rows: Rows = Tensor.double) -> float:
    """An upper bound on σ_max of a matrix: by eigenvalues of its smaller Gram matrix, or the Frobenius norm if large.

    matrix: in any dtype. rows: maps rows of it to float64 rows of the matrix that is bounded.
    """
    if min(matrix.shape) > SPECTRAL_SIDE:
        return float(torch.linalg.vector_norm(row_lengths(matrix, rows))) * ROUNDING
    if matrix.shape[0] > matrix.shape[1]:
        gram = sum(piece.mT @ piece for piece in map(rows, matrix.split(ROWS)))
    else:
        whole = rows(matrix)
        gram = whole @ whole.mT
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()) * ROUNDING


def row_lengths(matrix: Tensor, rows: Rows = Tensor.double) -> Tensor:
    """The length of each row, (n,) float64; arguments as in `spectral_limit`."""
    return torch.cat([torch.linalg.vector_norm(rows(piece), dim=-1) for piece in matrix.split(ROWS)])


def sum_maximum(sizes: Tensor, columns: Tensor, together: float = math.inf) -> float:
    """An upper bound on |Σ_n h_n w_n| for |h_n| ≤ sizes_n and |h| ≤ together: sizes (n,), columns w (n, M).

    The smaller one of Σ sizes_n |w_n| (triangle inequality) and σ_max(w) |h|.
    """
    triangle = float((sizes * row_lengths(columns)).sum()) * ROUNDING
    return min(triangle, spectral_limit(columns) * min(float(torch.linalg.vector_norm(sizes)), together))

"""Numbers of W_QK = A B^T from its thin factors, by d x d problems; no matrix of hidden size squared is formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BilinearNumbers:
    """Numbers of W = A B^T of one head's bilinear form z_i A B^T z_j^T."""

    singular_values: Tensor  # (min(d_A, d_B),); the others are zero
    frobenius_norm: float
    stable_rank: float | None  # |W|_F^2 / sigma_1^2; None where W is zero
    symmetric_share: float | None  # |(W + W^T) / 2|_F / |W|_F; None where W is zero or not square


@dataclass(frozen=True)
class Thin:
    """A factor of a form, (width, d), with R of its QR factorisation."""

    factor: Tensor  # (width, d)
    R: Tensor  # (min(width, d), d), float64


def thin(A: Tensor) -> Thin:
    """The factor (width, d) with its R. It is kept in its own dtype, since a float64 copy may be twice its size."""
    return Thin(A, torch.linalg.qr(A.double()).R)


def bilinear_numbers(left: Thin, right: Thin) -> BilinearNumbers:
    """Numbers of W = A B^T, in float64. left: A; right: B.

    QR of both leaves R_A R_B^T with the singular values of W; |W + W^T|^2 = 2 |W|^2 + 2 tr(W W), and
    tr(W W) = tr((B^T A)(B^T A)).
    """
    values = torch.linalg.svdvals(left.R @ right.R.T)
    square = float(values.square().sum())
    if square == 0.0:
        return BilinearNumbers(values, 0.0, None, None)
    A, B, share = left.factor.double(), right.factor.double(), None
    if A.shape == B.shape:
        inner = B.T @ A
        share = max(0.0, (square + float((inner * inner.T).sum())) / (2 * square)) ** 0.5
    return BilinearNumbers(values, square**0.5, square / float(values[0]) ** 2, share)


def explained(scores: Tensor, by: Tensor, pairs: Tensor) -> Tensor:
    """R^2 of scores (heads, N, N) on one regressor with an intercept, over the pairs (N, N) bool that are attended.

    by: the regressor, (N, N) or (heads, N, N). Returns (heads,), float64; NaN where scores or regressor do not vary.
    """
    y = scores.double()[:, pairs]
    x = by.double().expand(scores.shape)[:, pairs]
    y, x = (one - one.mean(dim=1, keepdim=True) for one in (y, x))
    size = y.square().sum(dim=1) * x.square().sum(dim=1)
    still = size <= (torch.finfo(scores.dtype).eps ** 2 * scores[:, pairs].double().square().sum(dim=1)) ** 2
    return ((x * y).sum(dim=1).square() / size).masked_fill(still, torch.nan)

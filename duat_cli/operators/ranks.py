"""How many directions a matrix really has: several meanings of rank, from its singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.operators.lowrank import EXACT_SIDE


@dataclass(frozen=True)
class Ranks:
    """Of one nonzero matrix; σ are its singular values."""

    numerical: int  # σ above max(shape) eps σ_1
    stable: float  # Σσ² / σ_1²
    entropy: float  # exp of the entropy of σ²/Σσ²
    energy_90: int  # fewest directions that hold 90 % of Σσ²


def ranks(values: Tensor, shape: tuple[int, ...], eps: float) -> Ranks | None:
    """values: all nonzero singular values, descending, float64; eps: of the stored dtype. None for a zero matrix."""
    energy = values.square()
    total = float(energy.sum())
    if total == 0.0:
        return None
    share = energy / total
    held = share.cumsum(0)
    return Ranks(
        numerical=int((values > max(shape) * eps * values[0]).sum()),
        stable=total / float(energy[0]),
        entropy=float(torch.exp(-torch.special.xlogy(share, share).sum())),
        energy_90=min(int((held < 0.9).sum()) + 1, len(values)),
    )


_ROWS = 1 << 22  # entries worked on at a time, so that a large matrix is never wide as a whole


def rounding_floor(before: Tensor, after: Tensor, difference: Tensor) -> float:
    """The spectral norm that rounding alone may give after - before, two stored matrices; an upper estimate.

    before, after: (rows, columns) as stored; difference: after - before, float64. Of every entry these variances are
    summed: ulp(w)²/12 of both stored values, each in its own dtype; of a change d that was computed as a product and
    scaled before it was added, (u d)²/3 for two roundings to the dtype of `after` (u = eps/2, as ulp(d) ≤ 2 u |d|) and
    for min(rows, columns) partial sums in float32, the most that an inner dimension can have. A matrix of independent
    errors has a norm of about max over rows of the root of the summed variance, plus the same over columns (Bandeira &
    van Handel 2016); 5 % are added for the spread.

    An estimate: errors are taken as independent. Arithmetic coarser than the dtype of `after` is not counted, nor are
    terms of the product that cancel.
    """
    coarse = float(torch.finfo(after.dtype).eps)
    fine = min(coarse, float(torch.finfo(torch.float32).eps))
    product = (2 * coarse**2 + min(difference.shape) * fine**2) / 12
    rows, columns = 0.0, torch.zeros(difference.shape[1], dtype=torch.float64)
    step = max(1, _ROWS // max(1, difference.shape[1]))
    for old, new, change in zip(before.split(step), after.split(step), difference.split(step), strict=True):
        variance = _variance(old) + _variance(new) + product * change.square()
        rows = max(rows, float(variance.sum(1).max()))
        columns += variance.sum(0)
    return 1.05 * (rows**0.5 + float(columns.max()) ** 0.5)


def _variance(stored: Tensor) -> Tensor:
    """ulp²/12 of each entry, float64; below the normal numbers the spacing stays as it is there."""
    info = torch.finfo(stored.dtype)
    _, exponent = torch.frexp(stored.double().abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full(stored.shape, info.eps, dtype=torch.float64), exponent - 1).square() / 12


def svd_error(shape: tuple[int, ...], top: float, *, partial: bool) -> float:
    """How far the singular values of a dense matrix may be off as `spectrum` or, partial, `leading` finds them.

    top: σ_1. Of an SVD in float64 max(shape) eps σ_1; by a Gram matrix the root of that relative error, as it is of σ²;
    of products in float32 its eps.
    """
    if partial:
        return max(shape) * float(torch.finfo(torch.float32).eps) * top
    relative = max(shape) * float(torch.finfo(torch.float64).eps)
    return (relative if min(shape) <= EXACT_SIDE else relative**0.5) * top

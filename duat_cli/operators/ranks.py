"""How many directions a matrix really has: several meanings of rank, from its singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def rounding_floor(stored: Tensor, eps: float) -> float:
    """The spectral norm that rounding alone may give a difference of a matrix stored with that eps.

    Entry w is off by a uniform error of variance ulp(w)²/12; a matrix of independent errors has a norm of about
    max over rows of the root of the summed variance, plus the same over columns (Bandeira & van Handel 2016).
    An estimate: it takes rounding errors as independent. 5 % are added for the spread.
    """
    _, exponent = torch.frexp(stored)
    ulp = torch.ldexp(torch.full_like(stored, eps), exponent - 1)  # of w in [2^(e-1), 2^e)
    variance = torch.where(stored == 0, 0.0, ulp.square() / 12)
    return 1.05 * float(variance.sum(1).max().sqrt() + variance.sum(0).max().sqrt())

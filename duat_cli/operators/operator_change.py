"""The difference of two attention operators, split into what moved: routing, weights, and both together.

With W' = Σ_h Ĥ_h ⊗ A_hᵀ before and Σ_h Ĥ'_h ⊗ A'_hᵀ after (Eq. 17 of Wang & Li for the attention operator),

    W'_tuned - W'_base = Σ (Ĥ'-Ĥ) ⊗ Aᵀ  +  Σ Ĥ ⊗ (A'-A)ᵀ  +  Σ (Ĥ'-Ĥ) ⊗ (A'-A)ᵀ
                            routing           weights             interaction

and A'-A = dV O' + V dO with dV = V'-V, dO = O'-O: every part is a sum of Kronecker products of differences, so that
a small change is no difference of large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.kronecker import HeadFactors, frobenius_norm


@dataclass(frozen=True)
class Split:
    """Frobenius norms."""

    base: float
    total: float
    routing: float
    weights: float
    interaction: float


def maps_and_changes(base: HeadFactors, tuned: HeadFactors) -> HeadFactors:
    """The maps V O, dV O', V dO one list behind the other: (3 heads)."""
    if base.value.shape != tuned.value.shape or base.output.shape != tuned.output.shape:
        raise InputError(f"operators of other shapes: {tuple(base.value.shape)} and {tuple(tuned.value.shape)}")
    return HeadFactors(
        torch.cat([base.value, tuned.value - base.value, base.value]),
        torch.cat([base.output, tuned.output, tuned.output - base.output]),
    )


def split(base: Tensor, tuned: Tensor, G: Tensor) -> Split:
    """Norms of all parts by the one Gram matrix G of `maps_and_changes`, (3 heads, 3 heads): K[h, k] = ⟨left, left⟩."""
    heads = len(base)
    rows = torch.stack([base, tuned - base]).flatten(2).double()  # (2, heads, N²)
    K = torch.einsum("ahn,bkn->ahbk", rows, rows)  # of Ĥ and Ĥ'-Ĥ
    at = {
        # coefficients of (Ĥ, Ĥ'-Ĥ) in front of each of V O, dV O', V dO
        "base": ((1, 0), (0, 0), (0, 0)),
        "total": ((0, 1), (1, 1), (1, 1)),
        "routing": ((0, 1), (0, 0), (0, 0)),
        "weights": ((0, 0), (1, 0), (1, 0)),
        "interaction": ((0, 0), (0, 1), (0, 1)),
    }
    norms = {}
    for name, table in at.items():
        c = torch.tensor(table, dtype=torch.float64, device=K.device)  # (3, 2)
        products = torch.einsum("xa,ahbk,yb->xhyk", c, K, c).reshape(3 * heads, 3 * heads)
        norms[name] = frobenius_norm(products, G)
    return Split(**norms)

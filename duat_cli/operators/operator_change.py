"""The difference of two attention operators, split into what moved: routing, weights, and both together.

With W' = Σ_h Ĥ_h ⊗ A_hᵀ before and Σ_h Ĥ'_h ⊗ A'_hᵀ after (what Eq. 17 of Wang & Li is for a linear layer),

    W'_tuned - W'_base = Σ (Ĥ'-Ĥ) ⊗ Aᵀ  +  Σ Ĥ ⊗ (A'-A)ᵀ  +  Σ (Ĥ'-Ĥ) ⊗ (A'-A)ᵀ
                            routing           weights             interaction

and A'-A = dV O' + V dO with dV = V'-V, dO = O'-O. Every part is a sum of Kronecker products of differences, so a small
change is no difference of large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.kronecker import HeadFactors, frobenius_norm, quick_gram, told_apart


@dataclass(frozen=True)
class Split:
    """Frobenius norms of W'_base, of the whole difference and of its parts."""

    base: float
    total: float
    routing: float
    weights: float
    interaction: float


def maps_and_changes(base: HeadFactors, tuned: HeadFactors) -> HeadFactors:
    """Factors of the maps V O, dV O' and V dO, concatenated: 3 heads maps."""
    if base.value.shape != tuned.value.shape or base.output.shape != tuned.output.shape:
        raise InputError(f"operators of other shapes: {tuple(base.value.shape)} and {tuple(tuned.value.shape)}")
    return HeadFactors(
        torch.cat([base.value, tuned.value - base.value, base.value]),
        torch.cat([base.output, tuned.output, tuned.output - base.output]),
    )


def gram_of_changes(base: HeadFactors, tuned: HeadFactors) -> Tensor:
    """The Gram matrix of the maps A and their changes A'-A, (2 heads, 2 heads).

    Where dV O' and V dO cancel, as when channels are rotated within heads, they are added first, in float64: with
    [V, dV] = Q R, A = Q (R_V O) and A'-A = Q (R_dV O' + R_V dO).
    """
    quick = quick_gram(maps_and_changes(base, tuned))
    if told_apart(quick):
        parts = quick.reshape(3, base.heads, 3, base.heads)
        sums = parts.new_tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
        return torch.einsum("ax,xhyk,by->ahbk", sums, parts, sums).reshape(2 * base.heads, -1)
    base, tuned = base.in_float64(), tuned.in_float64()
    Q, R = torch.linalg.qr(torch.cat([base.value, tuned.value - base.value], dim=-1))
    kept, moved = R.repeat_interleave(base.groups, 0).chunk(2, dim=-1)
    changes = moved @ tuned.output + kept @ (tuned.output - base.output)
    return quick_gram(HeadFactors(torch.cat([Q, Q]), torch.cat([kept @ base.output, changes])))


def split(base: Tensor, tuned: Tensor, G: Tensor) -> Split:
    """Norms of all parts from Ĥ before and after, (heads, N, N) each, and G, the result of `gram_of_changes`."""
    heads = len(base)
    rows = torch.stack([base, tuned - base]).flatten(2).double()  # (2, heads, N²)
    K = torch.einsum("ahn,bkn->ahbk", rows, rows)  # of Ĥ and Ĥ'-Ĥ
    at = {
        # coefficients of (Ĥ, Ĥ'-Ĥ) in front of A and of A'-A
        "base": ((1, 0), (0, 0)),
        "total": ((0, 1), (1, 1)),
        "routing": ((0, 1), (0, 0)),
        "weights": ((0, 0), (1, 0)),
        "interaction": ((0, 0), (0, 1)),
    }
    norms = {}
    for name, table in at.items():
        c = torch.tensor(table, dtype=torch.float64, device=K.device)  # (2, 2)
        products = torch.einsum("xa,ahbk,yb->xhyk", c, K, c).reshape(2 * heads, 2 * heads)
        norms[name] = frobenius_norm(products, G)
    return Split(**norms)

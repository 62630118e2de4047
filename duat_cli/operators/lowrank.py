"""A change of low rank, ΔW = L R, by its factors: nothing here forms the dense product.

Singular values and vectors come from two thin QR factorisations and the SVD of a small core: with L = Q₁R₁ and
Rᵀ = Q₂R₂, ΔW = Q₁ (R₁R₂ᵀ) Q₂ᵀ. Inner products come from r x r products: ⟨L R, L' R'⟩ = Σ (LᵀL') ∘ (R R'ᵀ). Both
are blind to the gauge L → L G, R → G⁻¹ R, and to how a scale is split between the factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """ΔW = left @ right."""

    left: Tensor  # (rows, r)
    right: Tensor  # (r, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def mT(self) -> LowRank:  # noqa: N802 - as torch names it
        return LowRank(self.right.mT, self.left.mT)

    def dense(self) -> Tensor:
        """Written out: for changing a weight, and for tests."""
        return self.left @ self.right

    def minus(self, other: LowRank) -> LowRank:
        """The difference, whose rank is at most the sum of both."""
        return LowRank(torch.cat([self.left, -other.left], dim=1), torch.cat([self.right, other.right]))


@dataclass(frozen=True)
class Triplets:
    """Singular values, descending, and their vectors as columns."""

    left: Tensor  # (rows, k)
    values: Tensor  # (k,)
    right: Tensor  # (columns, k)


def singular(change: LowRank) -> Triplets:
    """The thin SVD of L R: O((rows + columns) r²)."""
    q_left, r_left = torch.linalg.qr(change.left)
    q_right, r_right = torch.linalg.qr(change.right.mT)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    return Triplets(q_left @ u, s, q_right @ vh.mT)


Piece = LowRank | Tensor
EXACT_SIDE = 1024  # up to here a dense SVD is quick; a Gram matrix loses what lies below 1e-8 of the largest value


def written_out(piece: Piece) -> Tensor:
    """The matrix or vector itself."""
    return piece.dense() if isinstance(piece, LowRank) else piece


def nonfinite(tensor: Tensor) -> int:
    """How many values are NaN or infinite; one quick pass where none is."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0
    low, high = (float(bound) for bound in torch.aminmax(tensor))  # NaN if any value is
    sound = abs(low) < float("inf") and abs(high) < float("inf")
    return 0 if sound else int((~torch.isfinite(tensor)).sum())


def energy(tensor: Tensor) -> float:
    """Σ x², in float64 and in parts, so that a large tensor of a narrow dtype is never wide as a whole."""
    parts = tensor.reshape(-1).split(1 << 22)
    return sum(float(part.double().square().sum()) for part in parts)


def is_zero(piece: Piece) -> bool:
    if isinstance(piece, LowRank):
        return is_zero(piece.left) or is_zero(piece.right)
    return not piece.numel() or all(float(bound) == 0.0 for bound in torch.aminmax(piece))


def spectrum(piece: Piece) -> Tensor:
    """Singular values, descending; of a large dense matrix by the eigenvalues of its smaller Gram matrix."""
    if isinstance(piece, LowRank):
        return singular(piece).values
    if min(piece.shape) <= EXACT_SIDE:
        return torch.linalg.svdvals(piece)
    gram = piece @ piece.mT if piece.shape[0] < piece.shape[1] else piece.mT @ piece
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)


def inner(a: Piece, b: Piece) -> float:
    """⟨A, B⟩_F of two changes of one shape."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return float((a * b).sum())
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return float(((a.left.mT @ b.left) * (a.right @ b.right.mT)).sum())
    low, dense = (a, b) if isinstance(a, LowRank) else (b, a)
    assert isinstance(low, LowRank)
    assert isinstance(dense, Tensor)
    return float(((low.left.mT @ dense) * low.right).sum())


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Cosines of the principal angles between two subspaces, descending; a (n, i), b (n, j) orthonormal."""
    return torch.linalg.svdvals(a.mT @ b).clamp(max=1.0)

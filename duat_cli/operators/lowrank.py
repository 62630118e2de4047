"""A change of low rank, ΔW = L R, by its factors, without the dense product.

Singular values and vectors come from two thin QR factorisations and the SVD of a small core: with L = Q₁R₁ and
Rᵀ = Q₂R₂, ΔW = Q₁ (R₁R₂ᵀ) Q₂ᵀ. Inner products come from r x r products: ⟨L R, L' R'⟩ = Σ (LᵀL') ∘ (R R'ᵀ). Both are
independent of the gauge L → L G, R → G⁻¹ R, and of how a scale is split between the factors.
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
        """The dense product, for changing a weight and for tests."""
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
EXACT_SIDE = 1024  # largest side for a dense SVD; a Gram matrix loses values below 1e-8 of the largest


def written_out(piece: Piece) -> Tensor:
    """The piece as a matrix or vector."""
    return piece.dense() if isinstance(piece, LowRank) else piece


def nonfinite(tensor: Tensor) -> int:
    """How many values are NaN or infinite; it takes one quick pass where none is."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0
    low, high = (float(bound) for bound in torch.aminmax(tensor))  # NaN if any value is
    sound = abs(low) < float("inf") and abs(high) < float("inf")
    return 0 if sound else int((~torch.isfinite(tensor)).sum())


def energy(tensor: Tensor) -> float:
    """Σ x² in float64, in pieces, so that a large tensor of a narrow dtype is never converted as a whole."""
    parts = tensor.reshape(-1).split(1 << 22)
    return sum(float(part.double().square().sum()) for part in parts)


def is_zero(piece: Piece) -> bool:
    if isinstance(piece, LowRank):
        return is_zero(piece.left) or is_zero(piece.right)
    return not piece.numel() or all(float(bound) == 0.0 for bound in torch.aminmax(piece))


def spectrum(piece: Piece) -> Tensor:
    """Singular values, descending; those of a large dense matrix from the eigenvalues of its smaller Gram matrix."""
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


# -- ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Ranks of one nonzero matrix with singular values σ."""

    numerical: int  # σ above max(shape) eps σ_1
    stable: float  # Σσ² / σ_1²
    entropy: float  # exp of the entropy of σ²/Σσ²
    energy_90: int  # fewest directions that hold 90 % of Σσ²


def ranks(values: Tensor, shape: tuple[int, ...], eps: float) -> Ranks | None:
    """The ranks of a matrix of this shape; None for a zero matrix. values: all nonzero singular values, descending,
    float64. eps: that of the stored dtype."""
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


_ROWS = 1 << 22  # entries processed at once, so that a large matrix is never converted as a whole


def rounding_floor(before: Tensor, after: Tensor, difference: Tensor) -> float:
    """An upper estimate of the spectral norm that rounding alone may give to after - before, two stored matrices.

    before, after: (rows, columns) as stored. difference: after - before, float64. For every entry these variances are
    summed: ulp(w)²/12 of both stored values, each in its own dtype; and, for a change d that was computed as a product
    and scaled before it was added, (u d)²/3 for two roundings to the dtype of `after` (u = eps/2, as ulp(d) ≤ 2 u |d|)
    and for min(rows, columns) partial sums in float32, the most that an inner dimension can have. A matrix of
    independent errors has a norm of about the maximum over rows of the root of the summed variance, plus that over
    columns (Bandeira & van Handel 2016); 5 % are added for the spread.

    It is an estimate because errors are assumed to be independent. Arithmetic coarser than the dtype of `after` is not
    counted, nor are terms of the product that cancel.
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
    """ulp²/12 of each entry, float64; below the normal numbers the spacing is that of the smallest of them."""
    info = torch.finfo(stored.dtype)
    _, exponent = torch.frexp(stored.double().abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full(stored.shape, info.eps, dtype=torch.float64), exponent - 1).square() / 12


def svd_error(shape: tuple[int, ...], top: float, *, partial: bool) -> float:
    """The error that singular values of a dense matrix may have from `spectrum` or, with `partial`, from `leading`.

    For an SVD in float64 it is max(shape) eps σ_1. By a Gram matrix it is the root of that relative error, which is one
    of σ². For products in float32 eps is that of float32. top: σ_1.
    """
    if partial:
        return max(shape) * float(torch.finfo(torch.float32).eps) * top
    relative = max(shape) * float(torch.finfo(torch.float64).eps)
    return (relative if min(shape) <= EXACT_SIDE else relative**0.5) * top

"""Statistics of W' gathered row by row of tokens, so that H need not exist whole.

C[i, j] = ‖B_ij‖_F is the coupling of token j into token i and p_ij = C_ij² / Σ_j C_ij². Every statistic here is a
sum or a mean over rows i. Sums are kept in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CouplingNumbers:
    """How tokens reach each other; None where no row (or no second row) is nonzero."""

    off_diagonal_share: float | None  # 1 - Σ_i C_ii² / Σ C_ij²
    entropy_bits: float | None  # mean over rows of the entropy of p_i, bits
    effective_context: float | None  # mean over rows of 2^entropy, tokens
    mean_distance: float | None  # mean over rows of Σ_j p_ij |i - j|, tokens
    first_token_share: float | None  # mean of p_i0 over i >= 1


class CouplingSums:
    """Accumulates `CouplingNumbers` from rows of C². Rows that are all zero count in no mean."""

    def __init__(self) -> None:
        self._energy = self._diagonal = 0.0
        self._entropy = self._context = self._distance = self._first = 0.0
        self._rows = self._later_rows = 0

    def add(self, squares: Tensor, start: int) -> None:
        """squares: (n, N) of C_ij² for the rows i = start … start + n - 1."""
        squares = squares.double().clamp_min(0)
        totals = squares.sum(dim=1)
        i = torch.arange(start, start + len(squares), device=squares.device)
        j = torch.arange(squares.shape[1], device=squares.device)
        self._energy += float(totals.sum())
        self._diagonal += float(squares.gather(1, i[:, None]).sum())
        alive = totals > 0
        p = squares[alive] / totals[alive, None]
        entropy = -torch.special.xlogy(p, p).sum(dim=1) / torch.log(torch.tensor(2.0, dtype=p.dtype))
        self._rows += len(p)
        self._entropy += float(entropy.sum())
        self._context += float(torch.exp2(entropy).sum())
        self._distance += float((p * (i[alive, None] - j).abs()).sum())
        later = i[alive] >= 1
        self._later_rows += int(later.sum())
        self._first += float(p[later, 0].sum())

    def numbers(self) -> CouplingNumbers:
        rows, later = self._rows, self._later_rows
        return CouplingNumbers(
            off_diagonal_share=min(max(1 - self._diagonal / self._energy, 0.0), 1.0)
            if self._energy
            else None,
            entropy_bits=self._entropy / rows if rows else None,
            effective_context=self._context / rows if rows else None,
            mean_distance=self._distance / rows if rows else None,
            first_token_share=self._first / later if later else None,
        )


class OperatorSums:
    """Accumulates what W' as a whole needs from rows of Ĥ: K, the correlation of blocks, the block norms."""

    def __init__(self, root: Tensor) -> None:
        """root: R with R R = G, (heads, heads), float64."""
        heads = len(root)
        self._root = root
        self.head_products = torch.zeros(heads, heads, dtype=torch.float64, device=root.device)  # K
        self._directions = torch.zeros_like(self.head_products)  # Σ û ûᵀ
        self.nonzero_blocks = 0
        self.coupling = CouplingSums()

    def add(self, rows: Tensor, start: int) -> Tensor:
        """rows: Ĥ[:, start : start + n, :], (heads, n, N). Returns C² of these rows, (n, N)."""
        heads, count, tokens = rows.shape
        flat = rows.reshape(heads, -1).double()
        self.head_products += flat @ flat.T
        vectors = self._root @ flat  # R ĥ_ij, (heads, n N)
        squares = vectors.square().sum(dim=0)
        alive = squares > 0
        weight = torch.where(alive, squares.clamp_min(torch.finfo(torch.float64).tiny).reciprocal(), 0.0)
        self._directions += (vectors * weight) @ vectors.T
        self.nonzero_blocks += int(alive.sum())
        squares = squares.reshape(count, tokens)
        self.coupling.add(squares, start)
        return squares

    def block_correlation(self) -> float | None:
        """Root mean square cosine over all pairs of nonzero blocks = ‖mean of û ûᵀ‖_F."""
        if not self.nonzero_blocks:
            return None
        return float(torch.linalg.matrix_norm(self._directions / self.nonzero_blocks))


def token_grams(values: Tensor, output: Tensor) -> Tensor:
    """Q[j, h, k] = ⟨v_jh O_h, v_jk O_k⟩, (N, heads, heads).

    values: (heads, N, d), the values without bias; output: (heads, d, M). ‖B_ij x_j‖² = ĥ_ijᵀ Q_j ĥ_ij.
    """
    vectors = (values @ output).transpose(0, 1)  # (N, heads, M)
    return vectors @ vectors.mT


def weighted_squares(rows: Tensor, grams: Tensor) -> Tensor:
    """‖B_ij x_j‖² = ĥ_ijᵀ Q_j ĥ_ij: rows (heads, n, N), grams (N, heads, heads) to (n, N)."""
    by_source = rows.permute(2, 1, 0).to(grams.dtype)  # (N, n, heads)
    return ((by_source @ grams) * by_source).sum(dim=-1).T.clamp_min(0)

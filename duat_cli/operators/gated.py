"""Statistics of a W' whose channels are scaled by the token that receives them, by one Gram matrix per token.

B_ij = (Σ_h Ĥ_h[i, j] A_ih)ᵀ with A_ih = V_h diag(g_ih) O_h, a different map for every token i. Every number is a closed
form in Ĥ and P[i, h, k, l] = ⟨A_ih, A_kl⟩, from the Gram matrix of channels Γ[c, c'] = ⟨v_c o_c, v_c' o_c'⟩:

    P[i, h, k, l] = Σ_{c in h, c' in l} g_ic Γ[c, c'] g_kc'        C_ij² = ĥ_ijᵀ P_ii ĥ_ij

W' is Σ_ih (e_i ⊗ Ĥ_h[i]) ⊗ A_ihᵀ, so the singular values of the rearranged W' (Van Loan & Pitsianis 1993) are those of
T P T, T the root of the block-diagonal K_i[h, l] = Σ_j Ĥ_h[i, j] Ĥ_l[i, j].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors, channel_gram

SPECTRUM_SIDE = 2048  # tokens times heads up to which P is formed whole


class ChannelGram:
    """Γ of a block's factors, which depends only on the checkpoint."""

    def __init__(self, factors: HeadFactors) -> None:
        self._gram = channel_gram(factors)

    def by_token(self, gate: Tensor) -> Tensor:
        """P_ii of every token, (n, heads, heads). gate: g of these tokens, (heads, n, d)."""
        left = torch.einsum("hnd,hdke->nhke", gate, self._gram)
        return torch.einsum("nhke,kne->nhk", left, gate)

    def between(self, gate: Tensor) -> Tensor:
        """P of these tokens, (n, heads, n, heads), float64."""
        left = torch.einsum("hnd,hdke->knhe", gate, self._gram)  # (heads, n, heads, d)
        heads, tokens, rank = gate.shape
        product = left.reshape(heads, tokens * heads, rank) @ gate.mT  # (k, n h, m)
        return product.reshape(heads, tokens, heads, tokens).permute(1, 2, 3, 0).double()


class GatedSums:
    """Accumulates numbers of W' as a whole from rows of Ĥ: its energy, and for few tokens K_i and the directions."""

    def __init__(self, gram: ChannelGram, gate: Tensor) -> None:
        """gate: g, (heads, N, d)."""
        self._gram, self._gate = gram, gate
        self._whole = gate.shape[0] * gate.shape[1] <= SPECTRUM_SIDE
        self._products: list[Tensor] = []  # K_i
        self._directions: list[Tensor] = []  # Σ_j û ûᵀ in the coordinates of heads
        self.energy = 0.0  # ‖W'‖_F²
        self.nonzero_blocks = 0

    def add(self, rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """rows: some rows of Ĥ, (heads, n, N). Returns their C² and which of their blocks are not zero, (n, N) each."""
        count = rows.shape[1]
        maps = self._gram.by_token(self._gate[:, start : start + count])  # (n, heads, heads)
        heads = rows.transpose(0, 1)  # (n, heads, N)
        # Entries go down to 1e-45, whose square is zero: each ĥ_ij is first scaled to a largest entry of one.
        size = heads.abs().amax(dim=1).clamp_min(torch.finfo(heads.dtype).smallest_normal)  # (n, N)
        vectors = heads / size[:, None]
        squares = ((maps @ vectors) * vectors).sum(dim=1).clamp_min(0)
        alive = squares > 0
        whole = squares * size.square()
        self.energy += float(whole.sum(dtype=torch.float64))
        self.nonzero_blocks += int(alive.sum())
        if self._whole:
            wide, unit = heads.double(), vectors.double()
            self._products.append(wide @ wide.mT)
            self._directions.append((unit / (squares + ~alive)[:, None]) @ unit.mT)
        return whole, alive

    def spectrum(self) -> Tensor | None:
        """The singular values of the rearranged W', descending; None where there are too many tokens times heads."""
        if not self._whole:
            return None
        root = _roots(torch.cat(self._products))
        return torch.linalg.eigvalsh(_between(root, self._whole_gram)).clamp_min(0).sqrt().flip(0)

    def block_correlation(self) -> float | None:
        """Root mean square cosine over all pairs of nonzero blocks; None without any, or where P is too large."""
        if not self._whole or not self.nonzero_blocks:
            return None
        root = _roots(torch.cat(self._directions))
        return min(float(torch.linalg.matrix_norm(_between(root, self._whole_gram))) / self.nonzero_blocks, 1.0)

    @functools.cached_property
    def _whole_gram(self) -> Tensor:
        """P of all tokens, (N, heads, N, heads), float64."""
        return self._gram.between(self._gate)


def _roots(matrices: Tensor) -> Tensor:
    """The symmetric roots of positive semidefinite matrices, (n, k, k)."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT


def _between(roots: Tensor, whole: Tensor) -> Tensor:
    """T P T for block-diagonal T, (n heads, n heads); roots: (n, heads, heads), whole: (n, heads, n, heads)."""
    count, heads = roots.shape[:2]
    left = torch.einsum("iab,ibkl->iakl", roots, whole)
    return torch.einsum("iakl,klc->iakc", left, roots).reshape(count * heads, count * heads)

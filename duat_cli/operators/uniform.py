"""W' with every head's attention replaced by uniform attention over the tokens that a row may see, in closed form.

With Ĥ_h[i, j] = t_i s_hj / n_i on the n_i positions j that some head of row i reaches, and s_j = (s_1j … s_hj):

    B_ij = (t_i / n_i) (Σ_h s_hj V_h O_h)ᵀ      C_ij² = (t_i / n_i)² s_jᵀ G s_j
    K = Σ_j c_j s_j s_jᵀ,  c_j = Σ_i [i sees j] t_i² / n_i²      ‖B_ij x_j‖² = (t_i / n_i)² ‖Σ_h v_jh O_h‖²

so everything except the pattern of positions is a number or a vector for each source token j. Blocks of a network that
share the pattern are processed together: axis b below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from duat_cli.operators.coupling import CouplingNumbers, CouplingSums, distances
from duat_cli.operators.kronecker import at_offsets, singular_values

PATTERN_ELEMENTS = 1 << 20  # pairs of tokens processed at once


def uniform_rows(seen: Tensor, heads: int, dtype: torch.dtype, offsets: Sequence[int] = (0,)) -> Tensor:
    """H with every row 1 / n over the n tokens that it sees, zero where it sees none: (heads, N, K).

    seen: (N, K) bool. offsets: as in `at_offsets`; `heads` then counts every head once per offset.
    """
    level = seen.to(torch.promote_types(dtype, torch.float32))
    level = (level / seen.sum(dim=-1, keepdim=True).clamp_min(1)).to(dtype)[None]
    if tuple(offsets) == (0,):
        return level.expand(heads, -1, -1)
    return at_offsets(level, offsets).repeat_interleave(heads // len(offsets), 0)


class UniformOperators:
    """The uniform W' of several blocks on one input, in float64."""

    def __init__(self, seen: Tensor, sources: Tensor, token_scale: Tensor, root: Tensor, arriving: Tensor) -> None:
        """seen: whether row i reaches j, (N, N) bool; sources: s_j, (b, N, heads); token_scale: t, (b, N).

        root: R with R R = G, (b, heads, heads); arriving: ‖Σ_h v_jh O_h‖², (b, N).
        """
        self.sources = sources
        self._vectors = sources @ root  # R s_j, (b, N, heads)
        self._energy = energy = self._vectors.square().sum(dim=-1)  # s_jᵀ G s_j, (b, N)
        self.alive = energy > 0
        kinds = torch.stack([energy, arriving.clamp_min(0)], dim=1)  # (b, 2, N)
        self._kinds = kinds / kinds.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(kinds.dtype).tiny)
        self.row_scale = token_scale.abs() / seen.sum(dim=1).clamp_min(1)  # |t_i| / n_i, (b, N)
        self._received = torch.zeros_like(energy)  # c_j
        self.readers = torch.zeros_like(energy)  # how many rows with t_i ≠ 0 see j
        self._coupling = CouplingSums(kinds=2 * len(kinds))
        step = max(1, PATTERN_ELEMENTS // len(seen))
        for start in range(0, len(seen), step):
            self._add(seen[start : start + step].double(), start)

    def _add(self, seen: Tensor, start: int) -> None:
        """Adds some rows, (n, N), with p_ij = [i sees j] q_j / Σ_j [i sees j] q_j for both kinds of q."""
        here = slice(start, start + len(seen))
        weight = self.row_scale[:, here].square()  # (t_i / n_i)², (b, n)
        received, readers = _each(torch.stack([weight, weight.sign()], dim=1), seen).unbind(1)
        self._received += received
        self.readers += readers
        q, weight = self._kinds, weight[:, None]
        totals, logs = _each(torch.cat([q, torch.special.xlogy(q, q)], dim=1), seen.T).split(2, dim=1)  # (b, 2, n)
        alive = (totals * weight).sign()
        total = totals + (1 - alive)
        entropy = (total.log() - logs / total).clamp_min(0) / math.log(2)
        far = _each(q, (seen * distances(start, *seen.shape, seen.dtype, seen.device)).T)
        later = alive.clone()
        later[..., : max(1 - start, 0)] = 0
        columns = {
            "energy": totals * weight,
            "diagonal": seen.diagonal(start) * q[..., here] * weight,
            "rows": alive,
            "entropy": entropy * alive,
            "context": torch.exp2(entropy) * alive,
            "distance": far / total * alive,
            "later_rows": later,
            "first": seen[:, 0] * q[..., :1] / total * later,
        }
        self._coupling.add_rows({name: column.flatten(0, 1) for name, column in columns.items()})

    def frobenius_norms(self) -> list[float]:
        """‖W'‖_F = sqrt(Σ_j c_j s_jᵀ G s_j) of each block."""
        squares: list[float] = (self._received * self._energy).sum(dim=-1).tolist()
        return [square**0.5 for square in squares]

    def spectra(self) -> Tensor:
        """The singular values of the rearranged W', descending, (b, heads or N): from R K R with K = Σ_j c_j s_j s_jᵀ,
        as in `kronecker_spectrum`."""
        return singular_values(_smaller(self._vectors, self._received))

    def nonzero_blocks(self) -> Tensor:
        """How many B_ij are not zero, (b,)."""
        return (self.readers * self.alive).sum(dim=-1)

    def block_correlations(self) -> list[float | None]:
        """Root mean square cosine over all pairs of nonzero B_ij, ‖mean of û ûᵀ‖_F; None where all are zero."""
        blocks = self.nonzero_blocks()
        directions = self._vectors / (self._energy + ~self.alive).sqrt()[..., None]
        moments = _smaller(directions, self.readers) / blocks.clamp_min(1)[:, None, None]
        sizes = torch.linalg.matrix_norm(moments).clamp_max(1.0).tolist()
        return [size if count else None for size, count in zip(sizes, blocks.tolist(), strict=True)]

    def coupling(self, block: int) -> CouplingNumbers:
        """The coupling by ‖B_ij‖_F."""
        return self._coupling.numbers(2 * block)

    def weighted(self, block: int) -> CouplingNumbers:
        """The coupling by ‖B_ij x_j‖."""
        return self._coupling.numbers(2 * block + 1)


def _smaller(vectors: Tensor, weights: Tensor) -> Tensor:
    """Σ_j w_j v_j v_jᵀ or, if that has more rows, sqrt(w_i w_j) ⟨v_i, v_j⟩, which has the same nonzero eigenvalues.
    vectors: (b, N, heads). weights: (b, N)."""
    if vectors.shape[-1] <= vectors.shape[-2]:
        return (vectors * weights[..., None]).mT @ vectors
    scaled = vectors * weights.sqrt()[..., None]
    return scaled @ scaled.mT


def _each(vectors: Tensor, matrix: Tensor) -> Tensor:
    """vectors (b, k, m) times matrix (m, n), block by block, so that no result depends on the other blocks."""
    return torch.bmm(vectors, matrix.expand(len(vectors), *matrix.shape))

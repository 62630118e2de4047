"""The attention operator W' as a sum of Kronecker products; the matrix itself is never built.

X is N x M, one token per row; x' = vec(X) is row-major (`X.reshape(-1)`), so vec(H X A) = (H ⊗ Aᵀ) vec(X).
With Ĥ_h (N x N), V_h (M x d) and O_h (d x M), the W' of Eq. 10 of Wang & Li, who leave it without a formula, is

    W' = Σ_h Ĥ_h ⊗ (V_h O_h)ᵀ,      block from token j to token i:  B_ij = (Σ_h Ĥ_h[i, j] V_h O_h)ᵀ

Every number below is a closed form in Ĥ and the Gram matrix G[h, k] = ⟨V_h O_h, V_k O_k⟩. Where a gate g_ih scales the
channels that token i receives, B_ij = (Σ_h Ĥ_h[i, j] V_h diag(g_ih) O_h)ᵀ (gated.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import InputError

APART = 1e-2  # least eigenvalue of cosines for float32, whose error in a sum of maps is 1e-7 of its terms


@dataclass(frozen=True)
class HeadFactors:
    """V and O of a block's heads, which are the part of W' that does not depend on the input, and the biases outside
    W'.

    Grouped heads share a V: head h reads V[h // (heads // kv_heads)].
    """

    value: Tensor  # (kv_heads, width, d); W' has width M
    output: Tensor  # (heads, d, M)
    value_bias: Tensor | None = None  # (kv_heads, d)
    output_bias: Tensor | None = None  # (M,)

    def __post_init__(self) -> None:
        if self.value.shape[2] != self.output.shape[1] or self.heads % self.value.shape[0]:
            raise InputError(
                f"head factors do not fit: V {tuple(self.value.shape)} as (kv_heads, width, d), "
                f"O {tuple(self.output.shape)} as (heads, d, M)"
            )

    @property
    def groups(self) -> int:
        return self.output.shape[0] // self.value.shape[0]

    @property
    def heads(self) -> int:
        return self.output.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.output.shape[2]

    @property
    def width(self) -> int:
        """Width of the vectors that V reads: M if they are the stream."""
        return self.value.shape[1]

    def values_of(self, x: Tensor) -> Tensor:
        """x V_h, (kv_heads, N, d), for x (N, width): one product for all heads, in V's dtype if that is wider."""
        columns = self.value.transpose(0, 1).flatten(1)  # (width, kv_heads d): the memory layout of a V that was read
        return (
            (x.to(torch.promote_types(x.dtype, columns.dtype)) @ columns)
            .unflatten(1, (len(self.value), -1))
            .transpose(0, 1)
        )

    def in_float64(self) -> HeadFactors:
        """V and O in float64, without the biases."""
        return HeadFactors(self.value.double(), self.output.double())

    def without_values(self) -> HeadFactors:
        """These factors on `meta`, which keeps only their shapes."""
        biases = (None if bias is None else bias.to("meta") for bias in (self.value_bias, self.output_bias))
        return HeadFactors(self.value.to("meta"), self.output.to("meta"), *biases)

    def maps(self) -> Tensor:
        """A_h = V_h O_h, (heads, width, M), for small cases."""
        return self.value.repeat_interleave(self.groups, 0) @ self.output


def channels(factors: HeadFactors) -> HeadFactors:
    """Every channel as a head of width 1: value (heads d, width, 1), output (heads d, 1, M)."""
    value = factors.value.repeat_interleave(factors.groups, 0).transpose(1, 2)
    return HeadFactors(value.flatten(0, 1)[..., None], factors.output.flatten(0, 1)[:, None])


def shifted(x: Tensor, offset: int, axis: int) -> Tensor:
    """x moved along an axis: each place holds the entry `offset` places further on, zero beyond the ends. axis: < 0."""
    index = torch.arange(x.shape[axis], device=x.device) + offset
    inside = (index >= 0) & (index < x.shape[axis])
    taken = x.index_select(axis, index.clamp(0, x.shape[axis] - 1))
    return torch.where(inside.view(-1, *(1,) * (-axis - 1)), taken, torch.zeros_like(taken))


def at_offsets(H: Tensor, offsets: Sequence[int]) -> Tensor:
    """H S_k for every offset k, with S_k from token j to token j + k: (heads, rows, N) to (offsets heads, rows, N).

    For values made of several tokens, v_j = Σ_k x_{j-k} V_k, each V_k is mixed by H S_k.
    """
    return torch.cat([shifted(H, offset, -1) for offset in offsets])


@dataclass(frozen=True)
class KroneckerSum:
    """W' = Σ_h left_h ⊗ (V_h O_h)ᵀ; with a gate, H V is multiplied by it in front of O.

    W' is (N M, N M) where V reads the stream, and (N M, N width) where it reads other vectors.
    """

    left: Tensor  # (heads, N, N)
    factors: HeadFactors
    gate: Tensor | None = None  # (heads, N, d)

    def apply(self, X: Tensor) -> Tensor:
        """W' vec(X) as a matrix: Σ_h left_h (X V_h) O_h, (N, M)."""
        mixed = self.left @ (X @ self.factors.value).repeat_interleave(self.factors.groups, 0)  # (heads, N, d)
        mixed = mixed if self.gate is None else mixed * self.gate
        return torch.einsum("hnd,hdm->nm", mixed, self.factors.output)

    def apply_transposed(self, Y: Tensor) -> Tensor:
        """W'ᵀ vec(Y) as a matrix: Σ_h left_hᵀ (Y O_hᵀ) V_hᵀ, (N, width)."""
        back = Y @ self.factors.output.mT  # (heads, N, d)
        back = self.left.mT @ (back if self.gate is None else back * self.gate)
        values = self.factors.value.repeat_interleave(self.factors.groups, 0)
        return torch.einsum("hnd,hmd->nm", back, values)

    def dense(self, limit: int = 4096) -> Tensor:
        """W' as a dense matrix, (N M, N width), for tests and small cases. Raises InputError above the limit."""
        tokens = self.left.shape[-1]
        rows, columns = tokens * self.factors.hidden_size, tokens * self.factors.width
        if max(rows, columns) > limit:
            raise InputError(
                f"W' would be {rows} x {columns}, over the limit of {limit}; it is never built at that size"
            )
        if self.gate is None:
            return torch.einsum("hij,hab->ibja", self.left, self.factors.maps()).reshape(rows, columns)
        values = self.factors.value.repeat_interleave(self.factors.groups, 0)
        gated = self.gate[:, :, :, None] * self.factors.output[:, None]  # (heads, N, d, M)
        return torch.einsum("hij,had,hidb->ibja", self.left, values, gated).reshape(rows, columns)


def gram(factors: HeadFactors) -> Tensor:
    """G[h, k] = ⟨V_h O_h, V_k O_k⟩_F = Σ (V_hᵀ V_k) ∘ (O_h O_kᵀ), (heads, heads) in float64.

    Products are in the factors' dtype, or in float64 where maps nearly cancel each other.
    """
    quick = quick_gram(factors)
    narrow = factors.value.dtype != torch.float64
    return quick_gram(factors.in_float64()) if narrow and not told_apart(quick) else quick


def told_apart(G: Tensor) -> bool:
    """Whether no sum of these maps is much smaller than its terms: their cosines have no eigenvalue below `APART`."""
    if torch.equal(torch.count_nonzero(G), torch.count_nonzero(G.diagonal())):  # the heads read different channels
        return True
    return bool(each_told_apart(G))


def each_told_apart(grams: Tensor) -> Tensor:
    """Whether `told_apart` holds for each Gram matrix: (..., heads, heads) to (...) of bools."""
    less = grams.clone()  # positive definite where its cosines' eigenvalues are above APART
    size = less.diagonal(dim1=-2, dim2=-1)
    size.copy_(torch.where(size > 0, size * (1 - APART), 1.0))
    return torch.linalg.cholesky_ex(less).info == 0


def quick_gram(factors: HeadFactors) -> Tensor:
    """`gram` with products in the factors' dtype, even where maps nearly cancel."""
    return channel_gram(factors).sum(dim=(1, 3), dtype=torch.float64)


def channel_gram(factors: HeadFactors) -> Tensor:
    """Γ[c, c'] = ⟨v_c o_c, v_c' o_c'⟩ for every two channels, (heads, d, heads, d)."""
    kv_heads, width, rank = factors.value.shape
    heads, groups = factors.heads, factors.groups
    columns = factors.value.permute(0, 2, 1).reshape(kv_heads * rank, width)
    rows = factors.output.reshape(heads * rank, -1)
    inner = (columns @ columns.T).reshape(kv_heads, 1, rank, kv_heads, 1, rank)
    outer = (rows @ rows.T).reshape(kv_heads, groups, rank, kv_heads, groups, rank)
    return (outer * inner).reshape(heads, rank, heads, rank)


def gram_row(factors: HeadFactors, head: int) -> Tensor:
    """G[head, :], (heads,) in float64, at 1/heads of the work of `gram`."""
    value = factors.value[head // factors.groups]  # (M, d)
    inner = (value.mT @ factors.value).repeat_interleave(factors.groups, 0)  # (heads, d, d)
    return (inner * (factors.output[head] @ factors.output.mT)).sum(dim=(1, 2), dtype=torch.float64)


def gram_root(G: Tensor) -> Tensor:
    """The symmetric R with R R = G; eigenvalues that are negative by rounding count as zero."""
    diagonal = G.diagonal()
    if torch.equal(torch.diag(diagonal), G):  # the heads, which may be thousands, read different channels
        return torch.diag(diagonal.clamp_min(0).sqrt())
    values, vectors = torch.linalg.eigh(G)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


def frobenius_norm(K: Tensor, G: Tensor) -> float:
    """‖W'‖_F = sqrt(Σ_hk G[h, k] K[h, k]) with K[h, k] = ⟨Ĥ_h, Ĥ_k⟩."""
    return frobenius_norms(K, G)[0]


def frobenius_norms(K: Tensor, G: Tensor) -> list[float]:
    """‖W'‖_F of several W', which K, G or both have an axis of in front."""
    return [max(square, 0.0) ** 0.5 for square in (K * G).sum(dim=(-2, -1)).reshape(-1).tolist()]


def kronecker_spectrum(K: Tensor, root: Tensor) -> Tensor:
    """The singular values of the rearranged W', descending, (heads,), or of several, with an axis in front. root: G^½.

    Their squares are the eigenvalues of K G (Van Loan & Pitsianis 1993), computed from the symmetric R K R, R = G^½.
    """
    return singular_values(root @ K @ root)


def singular_values(gram: Tensor) -> Tensor:
    """The singular values, descending and on the CPU, of one matrix or several, from the Gram matrix."""
    rows = gram.cpu()  # so small that a GPU takes longer
    return torch.linalg.eigvalsh(rows).clamp_min(0).sqrt().flip(-1)


def effective_heads(spectrum: Tensor) -> float | None:
    """The effective number of Kronecker products of W', exp of the entropy of σ²/Σσ²; None for W' = 0."""
    energy = [value * value for value in spectrum.tolist()]  # few numbers: with a tensor it would take longer
    total = math.fsum(energy)
    if total == 0.0:
        return None
    entropy = -math.fsum(part / total * math.log(part / total) for part in energy if part / total > 0)
    return min(max(math.exp(entropy), 1.0), float(len(energy)))  # rounding may exceed the range by 1e-8

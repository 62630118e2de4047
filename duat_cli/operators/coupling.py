"""Statistics of W' gathered from rows of tokens, so that H need not be in memory whole.

C[i, j] = ‖B_ij‖_F is the coupling of token j into token i, and p_ij = C_ij² / Σ_j C_ij². Every statistic here is a sum
or a mean over rows i. Rows are processed in the dtype of the run (at least float32), and sums are kept in float64.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.operators.kronecker import each_told_apart

FEW_HEADS = 16


@dataclass(frozen=True)
class CouplingNumbers:
    """Statistics of the coupling between tokens; None where no row (or no row i >= 1) is nonzero."""

    off_diagonal_share: float | None  # 1 - Σ_i C_ii² / Σ C_ij²
    entropy_bits: float | None  # mean over rows of the entropy of p_i, bits
    effective_context: float | None  # mean over rows of 2^entropy, tokens
    mean_distance: float | None  # mean over rows of Σ_j p_ij |i - j|, tokens
    distance_deviation: float | None  # standard deviation over rows of Σ_j p_ij |i - j|, tokens
    first_token_share: float | None  # mean of p_i0 over i >= 1


class CouplingSums:
    """Accumulates `CouplingNumbers` from rows of C², for several kinds at once. All-zero rows count in no mean."""

    def __init__(self, kinds: int) -> None:
        self._sums = torch.zeros(kinds, len(_SUMMED), dtype=torch.float64)
        self._read: list[list[float]] = []  # the sums as Python numbers, once asked for

    def add(self, squares: Tensor, start: int) -> None:
        """Adds rows. squares: C_ij² for the rows i = start … start + n - 1, (kinds, n, K); of other tokens than j, as
        with cross-attention, the diagonal, distances and the first token mean nothing."""
        count, tokens = squares.shape[1:]
        totals = squares.sum(dim=-1)  # (kinds, n)
        alive = totals.sign()
        p = squares / (totals + (1 - alive))[..., None]
        entropy = entropies(p)
        distance = (p * distances(start, count, tokens, p.dtype, p.device)).sum(dim=-1)
        diagonal = squares.diagonal(start, dim1=-2, dim2=-1)
        later = alive.clone()
        later[:, : max(1 - start, 0)] = 0
        columns = {  # of an all-zero row p is zero, and therefore also entropy and distance
            "energy": totals,
            "diagonal": nn.functional.pad(diagonal, (0, count - diagonal.shape[-1])),
            "rows": alive,
            "entropy": entropy,
            "context": torch.exp2(entropy) * alive,
            "distance": distance,
            "later_rows": later,
            "first": p[..., 0] * later,
        }
        self.add_rows(columns)

    def add_rows(self, columns: dict[str, Tensor]) -> None:
        """Adds the summands of each row, by name: (kinds, n) each."""
        columns = {**columns, "squared_distance": columns["distance"].double().square()}
        added = torch.stack([columns[name] for name in _SUMMED]).sum(dim=-1, dtype=torch.float64).T
        self._sums = self._sums.to(added.device) + added
        self._read = []

    def numbers(self, kind: int) -> CouplingNumbers:
        """The numbers of one kind."""
        self._read = self._read or self._sums.tolist()
        s = dict(zip(_SUMMED, self._read[kind], strict=True))
        rows, later = s["rows"], s["later_rows"]
        variance = s["squared_distance"] / rows - (s["distance"] / rows) ** 2 if rows else None
        return CouplingNumbers(
            off_diagonal_share=min(max(1 - s["diagonal"] / s["energy"], 0.0), 1.0) if s["energy"] else None,
            entropy_bits=s["entropy"] / rows if rows else None,
            effective_context=s["context"] / rows if rows else None,
            mean_distance=s["distance"] / rows if rows else None,
            distance_deviation=math.sqrt(max(variance, 0.0)) if variance is not None else None,
            first_token_share=s["first"] / later if later else None,
        )


def entropies(p: Tensor) -> Tensor:
    """Entropy along the last axis, bits; 0 log 0 = 0. A plain logarithm is seven times faster than xlogy."""
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(dim=-1) / math.log(2)


@functools.lru_cache(maxsize=4)
def distances(start: int, count: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """|i - j| for the rows i = start … start + count - 1, (count, tokens)."""
    i, j = torch.arange(start, start + count, device=device), torch.arange(tokens, device=device)
    return (i[:, None] - j).abs().to(dtype)


_SUMMED = ("energy", "diagonal", "rows", "entropy", "context", "distance", "squared_distance", "later_rows", "first")


class OperatorSums:
    """Accumulates the numbers of W' as a whole from rows of Ĥ: K, the correlation of blocks, the block norms.

    For several W' with the same number of tokens every tensor has an axis of them in front.
    """

    def __init__(self, root: Tensor, several: int | None = None, *, cancels: bool = False) -> None:
        """root: R with R R = G, (heads, heads), float64. several: how many W'; None for one without that axis. cancels:
        whether W' may be much smaller than its terms, so that they are summed in float64."""
        lead = () if several is None else (several,)
        self._root, self._cancels = root, cancels
        writes = root.diagonal() > 0  # a head that writes nothing would make the others look small when scaled
        self._writes = None if bool(writes.all()) else writes[:, None]
        self.head_products = torch.zeros(*lead, *root.shape, dtype=torch.float64, device=root.device)  # K
        self._directions = torch.zeros_like(self.head_products)  # Σ û ûᵀ
        self.nonzero_blocks = torch.zeros(lead, dtype=torch.int64, device=root.device)

    def add(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows: some rows of Ĥ, (heads, n, N). Returns their C² and which of their blocks are not zero, (n, N) each."""
        shape = rows.shape[-2:]
        flat, heads = rows.double().flatten(-2) if self._cancels else rows.flatten(-2), len(self._root)
        flat = flat if self._writes is None else torch.where(self._writes, flat, 0.0)
        seen = without_tiny(flat, heads)
        self.head_products += seen @ seen.mT
        # Softmax goes down to 1e-45, whose square is zero: each ĥ_ij is first scaled to a largest entry of one.
        size = flat.abs().amax(dim=-2, keepdim=True).clamp_min(torch.finfo(flat.dtype).smallest_normal)  # (1, n N)
        vectors = self._root.to(flat.dtype) @ without_tiny(flat / size, heads)
        squares = vectors.square().sum(dim=-2, keepdim=True)  # |R ĥ_ij / size|²
        alive = squares > 0
        self._directions += (vectors / (squares + ~alive)) @ vectors.mT
        self.nonzero_blocks += torch.count_nonzero(alive) if alive.ndim == 2 else alive.sum(dim=(-2, -1))
        whole = (squares * size.square()).to(rows.dtype)
        return whole.squeeze(-2).unflatten(-1, shape), alive.squeeze(-2).unflatten(-1, shape)

    def block_correlations(self) -> list[float | None]:
        """Root mean square cosine over all pairs of nonzero blocks, ‖mean of û ûᵀ‖_F, for each W'; None for W' = 0."""
        counts = self.nonzero_blocks[..., None, None].clamp_min(1)
        sizes = torch.linalg.matrix_norm(self._directions / counts).clamp_max(1.0)
        pairs = zip(sizes.reshape(-1).tolist(), self.nonzero_blocks.reshape(-1).tolist(), strict=True)
        return [size if count else None for size, count in pairs]


class ValueSquares:
    """‖B_ij x_j‖² = ‖Σ_h ĥ_ijh v_jh O_h‖² for any rows of H: the squared size of what token j adds to token i.

    It is ĥ_ijᵀ Q_j ĥ_ij with a Gram matrix of the heads for every token, Q_j[h, k] = ⟨v_jh O_h, v_jk O_k⟩. With
    thousands of heads of one channel each, Q_j takes more work than the sum itself, which is then computed for every
    pair of tokens. Where the heads' contributions of some token nearly cancel, Q_j and the form are in float64:
    rounding of the terms' squares in float32 would exceed the result. For several prompts with the same number of
    tokens every tensor has an axis of them in front.
    """

    def __init__(self, values: Tensor, output: Tensor) -> None:
        """values: (heads, N, d), without bias; output: (heads, d, M)."""
        *lead, heads, tokens, width = values.shape
        self._grams: Tensor | None = None  # (N, heads, heads)
        if width == 1:
            self._values, self._root = values, narrow(output[:, 0])
        else:
            every = values.movedim(-3, 0).reshape(heads, -1, width)
            vectors = torch.bmm(every, output).transpose(0, 1)  # (N, heads, M)
            self._grams = _grams(vectors).unflatten(0, (*lead, tokens))

    def of(self, rows: Tensor) -> Tensor:
        """The squares, (n, K), for some rows of H over the first K tokens, (heads, n, K)."""
        sources = rows.shape[-1]
        if self._grams is not None:
            grams = self._grams[..., :sources, :, :]
            by_source = (
                without_tiny(rows, grams.shape[-1]).movedim(-1, -3).to(grams.dtype).contiguous()
            )  # (K, heads, n)
            return ((grams @ by_source) * by_source).sum(dim=-2).mT.clamp_min(0).to(rows.dtype)
        values = self._values[..., :sources, :]
        if values.ndim == 3:
            return channel_squares(rows, values, self._root)
        return torch.stack([channel_squares(*one, self._root) for one in zip(rows, values, strict=True)])

    def of_sums(self) -> Tensor:
        """‖Σ_h v_jh O_h‖² for every token, (N,)."""
        if self._grams is not None:
            return self._grams.sum(dim=(-2, -1))
        return (self._values[..., 0].mT @ self._root).square().sum(dim=-1)


def _grams(vectors: Tensor) -> Tensor:
    """Gram matrices (N, heads, heads) of vectors (N, heads, M); all are float64 where some need it."""
    grams = vectors @ vectors.mT
    close = (~each_told_apart(grams)).nonzero()[:, 0]
    if vectors.dtype == torch.float64 or not len(close):
        return grams
    grams = grams.double()
    for token in close.tolist():
        exact = vectors[token].double()
        grams[token] = exact @ exact.mT
    return grams


def channel_squares(rows: Tensor, values: Tensor, root: Tensor, gate: Tensor | None = None) -> Tensor:
    """‖Σ_h ĥ_ijh (v_jh ∘ g_ih) O_h‖², (n, N), computed with every channel of every pair of tokens.

    rows: rows of H, (heads, n, N). values: (heads, N, d). root: from `narrow`, of the concatenated O_h. gate: g of the
    receiving tokens, (heads, n, d).
    """
    found = []
    for i in range(rows.shape[1]):
        channels = rows[:, i, :, None] * values  # (heads, N, d)
        channels = without_tiny(channels if gate is None else channels * gate[:, i, None], len(rows))
        found.append((channels.transpose(0, 1).flatten(1) @ root).square().sum(dim=-1))
    return torch.stack(found)


def without_tiny(x: Tensor, heads: int) -> Tensor:
    """x with zeros for entries whose square is no normal number: these add nothing beside the others, and products with
    them take a hundred times as long. For few heads x is returned as it is, because replacing them saves no time."""
    if heads <= FEW_HEADS:
        return x
    return nn.functional.hardshrink(x, torch.finfo(x.dtype).smallest_normal ** 0.5)


def narrow(output: Tensor) -> Tensor:
    """A matrix R with R Rᵀ = O Oᵀ and no more columns than rows. output: O, (channels, M)."""
    return output if output.shape[1] <= output.shape[0] else torch.linalg.qr(output.mT).R.mT

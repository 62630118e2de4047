"""One block's W' under one input: its size, its density, and how it couples tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.geometry import Geometry
from duat_cli.models.factors import AttentionOperator
from duat_cli.operators.kronecker import effective_heads, frobenius_norm, kronecker_spectrum
from duat_cli.operators.sampling import ShareEstimate, exact_share, sampled_share
from duat_cli.operators.spectrum import spectral_norm
from duat_cli.operators.statistics import (
    CouplingNumbers,
    CouplingSums,
    OperatorSums,
    token_grams,
    weighted_squares,
)

EXACT_ENTRIES = 1 << 22  # entries of W' that are counted one by one; above it they are sampled
ROW_ELEMENTS = 1 << 19  # elements of Ĥ worked on at once
PAIR_DRAWS = 2048
SEED = 13


@dataclass(frozen=True)
class OperatorNumbers:
    """What W' says about one block and one input."""

    frobenius_norm: float
    effective_heads: float | None
    block_correlation: float | None
    spectral_norm: float | None
    structural: float  # share of entries that are not identically zero
    numerical: ShareEstimate | None  # None for W' = 0
    coupling: CouplingNumbers
    weighted: CouplingNumbers
    matrix: Tensor | None  # C, (N, N), if asked for


def measure(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    """All statistics of W' in one pass over the rows of H."""
    tokens, heads = operator.values.shape[1], operator.factors.heads
    sums, coupling = OperatorSums(geometry.root), CouplingSums(kinds=2)
    grams = token_grams(operator.values, operator.factors.output)
    pairs = _Pairs(tokens)
    squares: list[Tensor] = []
    filled = 0.0
    for start, attention in _row_pieces(operator, heads):
        scaled = attention * operator.source_scale[:, None, :]
        rows, alive = sums.add(scaled)
        coupling.add(torch.stack([rows, weighted_squares(attention, grams)]), start)
        pairs.add(scaled, alive, start)
        filled += geometry.pattern.filled(scaled.flatten(1).abs())
        if matrix:
            squares.append(rows)
    norm = frobenius_norm(sums.head_products, geometry.gram)
    nonzero = sums.nonzero_blocks / tokens**2
    return OperatorNumbers(
        frobenius_norm=norm,
        effective_heads=effective_heads(kronecker_spectrum(sums.head_products, geometry.root)),
        block_correlation=sums.block_correlation(),
        spectral_norm=_spectral(operator) if spectrum and norm > 0 else None,
        structural=filled / tokens**2,
        numerical=_numerical(operator, geometry, norm, threshold, pairs, nonzero) if norm > 0 else None,
        coupling=coupling.numbers(0),
        weighted=coupling.numbers(1),
        matrix=torch.cat(squares).sqrt() if matrix else None,
    )


def _row_pieces(operator: AttentionOperator, heads: int) -> Iterator[tuple[int, Tensor]]:
    for rows, attention in operator.attention_chunks():
        step = max(1, ROW_ELEMENTS // (heads * attention.shape[-1]))
        for first in range(0, attention.shape[1], step):
            yield rows.start + first, attention[:, first : first + step]


class _Pairs:
    """Uniformly drawn token pairs (i, j), their ĥ_ij, and whether their block is zero."""

    def __init__(self, tokens: int) -> None:
        self._i, self._j = _draws(tokens)
        self._found: list[tuple[Tensor, Tensor]] = []  # (draw indices, ĥ)

    def add(self, rows: Tensor, alive: Tensor, start: int) -> None:
        here = torch.arange(len(self._i))
        if rows.shape[1] < rows.shape[2]:
            here = ((self._i >= start) & (self._i < start + rows.shape[1])).nonzero()[:, 0]
        places = ((self._i[here] - start) * rows.shape[2] + self._j[here]).to(rows.device)
        alive = alive.flatten()[places]
        self._found.append((here.to(rows.device)[alive], rows.flatten(1)[:, places[alive]].T))

    def vectors(self, most: int) -> Tensor:
        """The first `most` draws that hit nonzero blocks, in order of drawing: (n, heads)."""
        if len(self._found) == 1:  # all rows at once: in order already
            return self._found[0][1][:most]
        places = torch.cat([p for p, _ in self._found])
        vectors = torch.cat([v for _, v in self._found])
        return vectors[places.argsort()][:most]


@functools.lru_cache(maxsize=8)
def _draws(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    i, j = torch.randint(tokens, (2, PAIR_DRAWS), generator=generator)
    return i, j


def _numerical(
    operator: AttentionOperator,
    geometry: Geometry,
    norm: float,
    threshold: float,
    pairs: _Pairs,
    nonzero: float,
) -> ShareEstimate | None:
    side = operator.values.shape[1] * operator.factors.hidden_size
    cutoff = threshold * norm / side  # rms(W') = ‖W'‖_F / (N M)
    if side**2 <= EXACT_ENTRIES:
        return exact_share(operator.matrix().left, operator.factors, cutoff)
    vectors = pairs.vectors(len(geometry.entries))
    if not len(vectors):
        return None
    return sampled_share(vectors, geometry.entries[: len(vectors)], cutoff, nonzero)


def _spectral(operator: AttentionOperator) -> float:
    whole = operator.matrix()
    tokens, width = operator.values.shape[1], operator.factors.hidden_size
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randn(tokens, width, generator=generator).to(operator.values)
    return spectral_norm(whole.apply, whole.apply_transposed, start)

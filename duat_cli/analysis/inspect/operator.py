"""One block's W' under one input: its size, its density, and how it couples tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.entries import Pairs, are_counted, cutoff_of, estimated
from duat_cli.models.value_path.factors import AttentionOperator
from duat_cli.operators.coupling import CouplingNumbers, CouplingSums, OperatorSums, token_grams, weighted_squares
from duat_cli.operators.kronecker import effective_heads, frobenius_norm, kronecker_spectrum
from duat_cli.operators.leading import spectral_norm
from duat_cli.operators.sampling import ShareEstimate, exact_share

ROW_ELEMENTS = 1 << 19  # elements of Ĥ worked on at once
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
    seen: Tensor  # which tokens each row may attend to; without a mask, those that some head reaches: (N, N)
    arriving: Tensor  # ‖Σ_h v_jh O_h‖² of each source token, (N,)
    matrix: Tensor | None  # C, (N, N), if asked for


def measure(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    """All statistics of W' in one pass over the rows of H."""
    tokens, heads = operator.values.shape[1], operator.factors.heads
    sums, coupling = OperatorSums(geometry.root), CouplingSums(kinds=2)
    grams = token_grams(operator.values, operator.factors.output)
    pairs = Pairs(tokens)
    squares: list[Tensor] = []
    seen: list[Tensor] = []
    # where it does not matter which heads reach a block, the blocks that any head reaches are counted
    whole, filled = geometry.pattern.alike and bool((operator.source_scale != 0).all()), 0.0
    for start, every in _row_pieces(operator, heads):
        seen.append(every.abs().amax(dim=0) > 0)
        width = _width(seen[-1], start)
        attention = every[..., :width]
        scaled = attention * operator.source_scale[:, None, :width]
        rows, alive = sums.add(scaled)
        coupling.add(torch.stack([rows, weighted_squares(attention, grams[:width])]), start)
        pairs.add(scaled, alive, start)
        if not whole:
            filled += geometry.pattern.filled(scaled.flatten(1).abs())
        if matrix:
            squares.append(nn.functional.pad(rows, (0, tokens - width)))
    reached = torch.cat(seen)
    if operator.allowed is not None and not bool((reached & ~operator.allowed).any()):
        # what the mask leaves counts, also where a softmax underflows
        reached = operator.allowed
        rows = (reached & (operator.token_scale != 0).reshape(-1, 1)).sum(dim=0)
        filled = geometry.pattern.filled(operator.source_scale.abs(), rows)
    elif whole:
        filled = int(torch.count_nonzero(reached)) * geometry.pattern.share()
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
        seen=reached,
        arriving=grams.sum(dim=(1, 2)),
        matrix=torch.cat(squares).sqrt() if matrix else None,
    )


def _row_pieces(operator: AttentionOperator, heads: int) -> Iterator[tuple[int, Tensor]]:
    for rows, attention in operator.attention_chunks():
        step = max(1, ROW_ELEMENTS // (heads * attention.shape[-1]))
        for first in range(0, attention.shape[1], step):
            yield rows.start + first, attention[:, first : first + step]


def _width(seen: Tensor, start: int) -> int:
    """How many columns of the rows from `start` on, (n, N), hold anything: the tokens behind the last one that some row
    sees, as under a causal mask, add nothing to any sum. The diagonal is kept."""
    columns = seen.any(dim=0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 0
    return max(last, start + len(seen))


def _numerical(
    operator: AttentionOperator, geometry: Geometry, norm: float, threshold: float, pairs: Pairs, nonzero: float
) -> ShareEstimate | None:
    side = operator.values.shape[1] * operator.factors.hidden_size
    cutoff = cutoff_of(side, norm, threshold)
    if are_counted(side):
        return exact_share(operator.matrix().left, operator.factors, cutoff)
    return estimated(pairs.vectors(len(geometry.entries)), geometry, cutoff, nonzero)


def _spectral(operator: AttentionOperator) -> float:
    whole = operator.matrix()
    tokens, width = operator.values.shape[1], operator.factors.hidden_size
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randn(tokens, width, generator=generator).to(operator.values)
    return spectral_norm(whole.apply, whole.apply_transposed, start)

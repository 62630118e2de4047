"""One block's W' under one input: its size, its density, and how it couples tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.measured.entries import Pairs, are_counted, cutoff_of, estimated
from duat_cli.analysis.inspect.measured.gated import measure_gated
from duat_cli.analysis.inspect.measured.numbers import OperatorNumbers, row_pieces, spectral
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import CouplingSums, OperatorSums, token_grams, weighted_squares
from duat_cli.operators.kronecker import effective_heads, frobenius_norm, kronecker_spectrum
from duat_cli.operators.sampling import ShareEstimate, exact_share


def measure(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    """All statistics of W' in one pass over the rows of H."""
    if operator.gate is not None:
        return measure_gated(operator, geometry, threshold=threshold, spectrum=spectrum, matrix=matrix)
    tokens, heads = operator.values.shape[1], operator.factors.heads
    sums, coupling = OperatorSums(geometry.root), CouplingSums(kinds=2)
    grams = token_grams(operator.values, operator.factors.output)
    pairs = Pairs(tokens)
    squares: list[Tensor] = []
    seen: list[Tensor] = []
    # where it does not matter which heads reach a block, the blocks that any head reaches are counted
    whole, filled = geometry.pattern.alike and bool(operator.source_scale.all()), 0.0
    for start, every in row_pieces(operator, heads):
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
    masked = operator.allowed is not None and not bool((reached & ~operator.allowed).any())
    if operator.allowed is not None and masked:
        reached = operator.allowed  # what the mask leaves counts, also where a softmax underflows
    met = reached & (operator.token_scale != 0).reshape(-1, 1)
    if whole:
        filled = int(torch.count_nonzero(met)) * geometry.pattern.share()
    elif masked:
        filled = geometry.pattern.filled(operator.source_scale.abs(), met.sum(dim=0))
    norm = frobenius_norm(sums.head_products, geometry.gram)
    nonzero = sums.nonzero_blocks / tokens**2
    return OperatorNumbers(
        frobenius_norm=norm,
        effective_heads=effective_heads(kronecker_spectrum(sums.head_products, geometry.root)),
        block_correlation=sums.block_correlation(),
        spectral_norm=spectral(operator) if spectrum and norm > 0 else None,
        structural=filled / tokens**2,
        numerical=_numerical(operator, geometry, norm, threshold, pairs, nonzero) if norm > 0 else None,
        coupling=coupling.numbers(0),
        weighted=coupling.numbers(1),
        seen=reached,
        arriving=grams.sum(dim=(1, 2)),
        matrix=torch.cat(squares).sqrt() if matrix else None,
    )


def _width(seen: Tensor, start: int) -> int:
    """How many columns of the rows from `start` on, (n, N), hold anything: the tokens behind the last one that some row
    sees, as under a causal mask, add nothing to any sum. The diagonal is kept."""
    if start + len(seen) >= seen.shape[1]:
        return seen.shape[1]
    columns = seen.any(dim=0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 0
    return max(last, start + len(seen))


def _numerical(
    operator: AttentionOperator, geometry: Geometry, norm: float, threshold: float, pairs: Pairs, nonzero: float
) -> ShareEstimate | None:
    tokens, factors = operator.values.shape[1], operator.factors
    inner, outer = tokens * factors.width, tokens * factors.hidden_size
    cutoff = cutoff_of(inner, outer, norm, threshold)
    if are_counted(inner * outer):
        return exact_share(operator.matrix().left, geometry.maps(), cutoff)
    return estimated(pairs.vectors(len(geometry.entries)), geometry, cutoff, nonzero)

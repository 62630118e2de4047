"""Statistics of W' of a block whose attention scales channels by the receiving token; operator.py has all others."""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.measured.entries import PAIR_DRAWS, are_counted, cutoff_of, draws
from duat_cli.analysis.inspect.measured.numbers import OperatorNumbers, row_pieces, spectral, visible
from duat_cli.errors import needed
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import CouplingSums, channel_squares, narrow
from duat_cli.operators.gated import SPECTRUM_SIDE, GatedSums
from duat_cli.operators.kronecker import HeadFactors, effective_heads
from duat_cli.operators.pattern import EntryPattern
from duat_cli.operators.sampling import ShareEstimate, exact_share, sampled_shares

MANY = f"a gate inside attention: computed up to {SPECTRUM_SIDE:,} tokens times heads"


def measure_gated(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    """All statistics of W' in one pass over the rows of H."""
    gate = needed(operator.gate)
    heads, tokens, _ = gate.shape
    sums, coupling = GatedSums(geometry.channels(), gate), CouplingSums(kinds=2)
    root = narrow(operator.factors.output.flatten(0, 1))
    squares: list[Tensor] = []
    rows: list[Tensor] = []
    for start, attention in row_pieces(operator.attention_chunks()):
        scaled = attention * operator.source_scale[:, None]
        found, _ = sums.add(scaled, start)
        here = gate[:, start : start + attention.shape[1]]
        coupling.add(torch.stack([found, channel_squares(attention, operator.values, root, here)]), start)
        squares.append(found)
        rows.append(scaled.abs().amax(dim=0) > 0)
    reached = visible(torch.cat(rows), operator.allowed)
    norm, nonzero = sums.energy**0.5, sums.nonzero_blocks / tokens**2
    values = sums.spectrum() if norm > 0 else None
    many = {} if heads * tokens <= SPECTRUM_SIDE else dict.fromkeys(("effective_heads", "block_correlation"), MANY)
    return OperatorNumbers(
        frobenius_norm=norm,
        effective_heads=None if values is None else effective_heads(values),
        block_correlation=sums.block_correlation(),
        spectral_norm=spectral(operator) if spectrum and norm > 0 else None,
        structural=_filled(operator, geometry.pattern, reached) / tokens**2,
        numerical=_numerical(operator, norm, threshold, nonzero) if norm > 0 else None,
        coupling=coupling.numbers(0),
        weighted=coupling.numbers(1),
        seen=reached,
        arriving=None,
        matrix=torch.cat(squares).sqrt() if matrix else None,
        reasons=many,
    )


def _filled(operator: AttentionOperator, pattern: EntryPattern, reached: Tensor) -> float:
    """Σ over blocks of the share of entries that can be nonzero; a gate of zero closes its channel."""
    gate = needed(operator.gate)
    sources = operator.source_scale.abs()  # (heads, N)
    live = reached & (operator.token_scale != 0).reshape(-1, 1)
    if bool((gate != 0).all()):
        return pattern.filled(sources, live.sum(dim=0))
    total = 0.0
    for i in range(gate.shape[1]):
        output = operator.factors.output * (gate[:, i] != 0)[..., None]
        total += EntryPattern(HeadFactors(operator.factors.value, output)).filled(sources, live[i].double())
    return total


def _numerical(operator: AttentionOperator, norm: float, threshold: float, nonzero: float) -> ShareEstimate | None:
    """Share of entries above the threshold: counted for a small W', otherwise estimated from drawn entries of drawn
    blocks."""
    whole = operator.matrix()
    gate, factors, tokens = needed(operator.gate), operator.factors, whole.left.shape[-1]
    inner, outer = tokens * factors.width, tokens * factors.hidden_size
    cutoff = cutoff_of(inner, outer, norm, threshold)
    values = factors.value.repeat_interleave(factors.groups, 0)
    if are_counted(inner * outer):
        shares = []
        for i in range(tokens):
            gated = HeadFactors(values, factors.output * gate[:, i, :, None])
            shares.append(exact_share(whole.left[:, i : i + 1], gated.maps(), cutoff).share)
        share = sum(shares) / tokens
        return ShareEstimate(share, share, share)
    targets, sources = draws(tokens, gate.device)
    pairs = whole.left[:, targets, sources]  # (heads, draws)
    hit = (pairs != 0).any(dim=0)
    targets, pairs = targets[hit], pairs[:, hit]
    generator = torch.Generator().manual_seed(11)
    a = torch.randint(factors.width, (PAIR_DRAWS,), generator=generator)[: len(targets)].to(gate.device)
    b = torch.randint(factors.hidden_size, (PAIR_DRAWS,), generator=generator)[: len(targets)].to(gate.device)
    entries = (values[:, a] * gate[:, targets] * factors.output[:, :, b].transpose(1, 2)).sum(dim=-1)  # (heads, draws)
    [found] = sampled_shares(pairs.T[None], entries.T, [cutoff], [nonzero])
    return found

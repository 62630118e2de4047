"""One block's W'_c under one input: the operator of cross-attention, with a row per decoder token and a column per
encoder token; or that of a mixer beside attention, with a row and a column per token.

The closed forms of W' also hold for a rectangular H: K[h, k] = ⟨Ĥ_h, Ĥ_k⟩ and G[h, k] = ⟨V_h O_h, V_k O_k⟩. The null
is measured in the same way, with H uniform over the tokens that a row may read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from duat_cli.analysis.decomposition import crossing
from duat_cli.analysis.geometry import Geometry, bare
from duat_cli.analysis.inspect.measured.gated import measure_gated
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, row_pieces
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import CouplingSums, OperatorSums, ValueSquares
from duat_cli.operators.kronecker import effective_heads, frobenius_norm, kronecker_spectrum
from duat_cli.results.operator import CrossOperator, CrossStats

ZERO = "W'_c is zero"


def cross_of(run: BlockRun, block: ProvedBlock, known: Callable[[], Geometry]) -> CrossOperator | None:
    """W'_c of one block under one input; None where it has neither cross-attention nor a mixer beside attention.

    known: as for `measure_cross`.
    """
    try:
        operator = crossing(run, block)
    except UnsupportedModelError as fault:
        sources, width = _read(run)
        return CrossOperator.absent(str(fault), rows=run.input[0].numel(), columns=sources * width)
    return None if operator is None else measure_cross(operator, known)


def _read(run: BlockRun) -> tuple[int, int]:
    """How many tokens W'_c reads, and their width; zeros where the call that reads them is not known."""
    if run.parts.second is not None:
        with contextlib.suppress(UnsupportedModelError):
            return run.second.value.shape[1], run.second.value.shape[2]
        return 0, 0
    call = run.recording.cross
    return (0, 0) if call is None else (call.states.shape[1], call.states.shape[2])


def measure_cross(operator: AttentionOperator, known: Callable[[], Geometry]) -> CrossOperator:
    """Statistics of a W'_c that has factors. known: gives the `bare` geometry of the factors; called only where there
    is no gate."""
    tokens, sources = operator.rows.tokens, operator.values.shape[1]
    norm, density, own, null = _plain(operator, known()) if operator.gate is None else _gated(operator)
    return CrossOperator(
        rows=tokens * operator.factors.hidden_size,
        columns=sources * operator.factors.width,
        frobenius_norm=norm,
        structural_density=density,
        stats=_stats_of(own),
        uniform=_stats_of(null),
        certificate_error=operator.error,
    )


def _stats_of(numbers: NullNumbers) -> CrossStats:
    return CrossStats.explained(
        ZERO,
        numbers.reasons,
        effective_heads=numbers.effective_heads,
        block_correlation=numbers.block_correlation,
        entropy_bits=numbers.coupling.entropy_bits,
        effective_context=numbers.coupling.effective_context,
        weighted_entropy_bits=numbers.weighted.entropy_bits,
        weighted_effective_context=numbers.weighted.effective_context,
    )


Measured = tuple[float, float, NullNumbers, NullNumbers]
"""‖W'_c‖_F, its structural density, its statistics, and the statistics of its null."""


def _gated(operator: AttentionOperator) -> Measured:
    """Measures a mixer whose channels are scaled by the receiving token."""
    known = bare(operator.factors)  # not kept beyond the prompt: the Gram matrix of its channels may take 32 MB
    own = measure_gated(operator, known, threshold=0.0, spectrum=False, matrix=False)
    null = measure_gated(operator.uniform(own.seen), known, threshold=0.0, spectrum=False, matrix=False)
    return own.frobenius_norm, own.structural, own, null


def _plain(operator: AttentionOperator, geometry: Geometry) -> Measured:
    seen = operator.allowed
    if seen is None:
        shape = operator.rows.tokens, operator.values.shape[1]
        seen = torch.ones(shape, dtype=torch.bool, device=operator.values.device)
    brought = ValueSquares(operator.values, operator.factors.output)
    norm, own = _measured(operator, geometry, brought)
    _, null = _measured(operator.uniform(seen), geometry, brought)
    return norm, null.structural, own, null  # H of the null is zero only where the mask is, never by underflow


def _measured(operator: AttentionOperator, known: Geometry, brought: ValueSquares) -> tuple[float, NullNumbers]:
    """‖W'_c‖_F, and the statistics in one pass over the rows of H. brought: squares of the values."""
    sums, filled, coupling = OperatorSums(known.root, cancels=known.cancels), 0.0, CouplingSums(kinds=2)
    for start, attention in row_pieces(operator.attention_chunks()):
        scaled = attention * operator.source_scale[:, None, :]
        squares, _ = sums.add(scaled)
        coupling.add(torch.stack([squares, brought.of(attention)]).double(), start)
        filled += known.pattern.filled(scaled.flatten(1).abs())
    return frobenius_norm(sums.head_products, known.gram), NullNumbers(
        effective_heads=effective_heads(kronecker_spectrum(sums.head_products, known.root)),
        block_correlation=sums.block_correlations()[0],
        structural=filled / (operator.rows.tokens * operator.values.shape[1]),
        numerical=None,
        coupling=coupling.numbers(0),
        weighted=coupling.numbers(1),
    )

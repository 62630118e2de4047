"""One block's W'_c under one input: the operator of cross-attention, with a row per decoder token and a column per
encoder token; or that of a mixer beside attention, with a row and a column per token.

The closed forms of W' also hold for a rectangular H: K[h, k] = ⟨Ĥ_h, Ĥ_k⟩ and G[h, k] = ⟨V_h O_h, V_k O_k⟩. The null
is measured in the same way, with H uniform over the tokens that a row may read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.analysis.decomposition import crossing
from duat_cli.analysis.geometry import Geometry, bare
from duat_cli.analysis.inspect.measured.gated import measure_gated
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, row_pieces
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import OperatorSums, ValueSquares
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
    norm, density, stats, uniform = _plain(operator, known()) if operator.gate is None else _gated(operator)
    return CrossOperator(
        rows=tokens * operator.factors.hidden_size,
        columns=sources * operator.factors.width,
        frobenius_norm=norm,
        structural_density=density,
        stats=stats,
        uniform=uniform,
        certificate_error=operator.error,
    )


Measured = tuple[float, float, CrossStats, CrossStats]
"""‖W'_c‖_F, its structural density, its statistics, and the statistics of its null."""


def _plain(operator: AttentionOperator, geometry: Geometry) -> Measured:
    seen, shape = operator.allowed, (operator.rows.tokens, operator.values.shape[1])
    if seen is None:
        seen = torch.ones(shape, dtype=torch.bool, device=operator.values.device)
    brought = ValueSquares(operator.values, operator.factors.output)
    norm, stats, _ = _measured(operator, geometry, brought)
    # `filled` is that of the null: its H is zero only where the mask is, never by underflow
    _, uniform, filled = _measured(operator.uniform(seen), geometry, brought)
    return norm, filled / math.prod(shape), stats, uniform


def _gated(operator: AttentionOperator) -> Measured:
    """Measures a mixer whose channels are scaled by the receiving token."""
    known = bare(operator.factors)  # not kept beyond the prompt: the Gram matrix of its channels may take 32 MB
    numbers = measure_gated(operator, known, threshold=0.0, spectrum=False, matrix=False)
    null = measure_gated(operator.uniform(numbers.seen), known, threshold=0.0, spectrum=False, matrix=False)
    return numbers.frobenius_norm, numbers.structural, _stats_of(numbers), _stats_of(null)


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


def _measured(operator: AttentionOperator, known: Geometry, brought: ValueSquares) -> tuple[float, CrossStats, float]:
    """‖W'_c‖_F, the statistics, and Σ over blocks of the share of nonzero entries, in one pass over the rows of H.

    brought: squares of the values.
    """
    sums, filled = OperatorSums(known.root, cancels=known.cancels), 0.0
    spread = (_Spread(), _Spread())
    for _, attention in row_pieces(operator.attention_chunks()):
        scaled = attention * operator.source_scale[:, None, :]
        squares, _ = sums.add(scaled)
        spread[0].add(squares)
        spread[1].add(brought.of(attention))
        filled += known.pattern.filled(scaled.flatten(1).abs())
    stats = CrossStats.explained(
        ZERO,
        effective_heads=effective_heads(kronecker_spectrum(sums.head_products, known.root)),
        block_correlation=sums.block_correlations()[0],
        entropy_bits=spread[0].entropy(),
        effective_context=spread[0].context(),
        weighted_entropy_bits=spread[1].entropy(),
        weighted_effective_context=spread[1].context(),
    )
    return frobenius_norm(sums.head_products, known.gram), stats, filled


class _Spread:
    """Over how many encoder tokens the input of a decoder token is spread; rows of zeros count in no mean."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, squares: Tensor) -> None:
        """Adds some rows of C², (n, K)."""
        totals = squares.double().sum(dim=-1)
        p = squares.double()[totals > 0] / totals[totals > 0][:, None]
        self._rows.append(-torch.special.xlogy(p, p).sum(dim=-1) / math.log(2))

    def entropy(self) -> float | None:
        """Entropy, mean over rows, in bits; None if all rows are zero."""
        rows = torch.cat(self._rows)
        return float(rows.mean()) if len(rows) else None

    def context(self) -> float | None:
        """Effective context 2^entropy, mean over rows, in encoder tokens; None if all rows are zero."""
        rows = torch.cat(self._rows)
        return float(torch.exp2(rows).mean()) if len(rows) else None

"""Numbers that describe one block's W' under one input, or a null of it, and what all ways to measure them share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from duat_cli.models.budgets import measured_at_once
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import CouplingNumbers
from duat_cli.operators.leading import spectral_norm
from duat_cli.operators.sampling import ShareEstimate

SEED = 13
STREAMS = "a token has several streams; W' is that of their unit weights, and only its norms are those of all entries"


@dataclass(frozen=True, kw_only=True)
class NullNumbers:
    """Statistics that are reported for W' and for its nulls."""

    effective_heads: float | None
    block_correlation: float | None
    structural: float  # share of entries that are not identically zero
    numerical: ShareEstimate | None  # None for W' = 0
    coupling: CouplingNumbers
    weighted: CouplingNumbers
    reasons: dict[str, str] = field(default_factory=dict)  # why a number is None, other than because W' = 0


@dataclass(frozen=True, kw_only=True)
class OperatorNumbers(NullNumbers):
    """All statistics of W' of one block under one input."""

    frobenius_norm: float
    spectral_norm: float | None
    seen: Tensor  # which tokens each row may attend to, (N, N); without a mask, those that some head reaches
    arriving: Tensor | None  # ‖Σ_h v_jh O_h‖² of each source token, (N,); None where it depends on the receiver
    matrix: Tensor | None  # C, (N, N), if asked for


def null_of(numbers: OperatorNumbers) -> NullNumbers:
    """The part of a null's statistics that is reported, without tensors."""
    return NullNumbers(**{one.name: getattr(numbers, one.name) for one in fields(NullNumbers)})


def visible(reached: Tensor, allowed: Tensor | None) -> Tensor:
    """Which tokens each row may attend to, (N, N): what the mask leaves, even where a softmax underflows; without a
    mask, or where some head reaches beyond it, what heads reach."""
    return reached if allowed is None or bool((reached & ~allowed).any()) else allowed


def row_pieces(chunks: Iterable[tuple[slice, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, some rows (heads, n, N)), as many as are processed at once. chunks: as from `RowSource`."""
    for rows, attention in chunks:
        heads = len(attention)
        step = max(1, measured_at_once(heads, gpu=attention.is_cuda) // (heads * attention.shape[-1]))
        for first in range(0, attention.shape[1], step):
            yield rows.start + first, attention[:, first : first + step]


def spectral(operator: AttentionOperator) -> float:
    """The spectral norm ‖W'‖₂."""
    whole = operator.matrix()
    tokens, factors = operator.values.shape[1], operator.factors
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randn(tokens, factors.width, generator=generator).to(operator.values)
    return spectral_norm(whole.apply, whole.apply_transposed, start, image=(tokens, factors.hidden_size))

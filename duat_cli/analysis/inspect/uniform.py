"""One null of a block's W': the same weights and scales, with H uniform over the tokens that each row may see."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.measured.entries import are_counted, cutoff_of, draws, estimated
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, OperatorNumbers, null_of
from duat_cli.analysis.inspect.operator import measure
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.kronecker import HeadFactors, effective_heads, frobenius_norm, kronecker_spectrum
from duat_cli.operators.sampling import ShareEstimate, exact_share
from duat_cli.operators.uniform import UniformOperators

PATTERN_BYTES = 1 << 26  # of patterns kept until their blocks are worked on


@dataclass(frozen=True)
class _Kept:
    """What a block's null needs; H is none of it."""

    index: int
    geometry: Geometry
    factors: HeadFactors
    sources: Tensor  # s, (N, heads)
    token_scale: Tensor  # t, (N,)
    arriving: Tensor  # ‖Σ_h v_jh O_h‖², (N,)


@dataclass
class _Group:
    """Blocks of as many heads whose rows see the same tokens."""

    seen: Tensor  # (N, N)
    heads: int
    blocks: list[_Kept] = field(default_factory=list)

    @functools.cached_property
    def met(self) -> tuple[Tensor, Tensor]:
        """(i, j) of the drawn token pairs of which i sees j, in order of drawing."""
        i, j = (drawn.to(self.seen.device) for drawn in draws(len(self.seen)))
        met = self.seen.flatten().index_select(0, i * len(self.seen) + j).nonzero()[:, 0]
        return i.index_select(0, met), j.index_select(0, met)


class UniformNulls:
    """The nulls of one prompt's blocks, computed together where their rows see the same tokens.

    together: False computes each at once, so that no block's factors are kept.
    """

    def __init__(self, threshold: float, *, together: bool = True) -> None:
        self._threshold, self._together = threshold, together
        self._groups: list[_Group] = []
        self._found: dict[int, NullNumbers] = {}

    def add(self, index: int, operator: AttentionOperator, geometry: Geometry, numbers: OperatorNumbers) -> None:
        """The block of that index, whose W' was measured."""
        if numbers.arriving is None or operator.offsets != (0,):  # with a gate, or values of several tokens
            even = operator.uniform(numbers.seen)
            found = measure(even, geometry, threshold=self._threshold, spectrum=False, matrix=False)
            self._found[index] = null_of(found)
            return
        tokens = len(numbers.seen)
        scale = operator.token_scale.double().expand(tokens)
        sources = operator.source_scale.T.double()
        kept = _Kept(index, geometry, operator.factors, sources, scale, numbers.arriving.double())
        self._group(numbers.seen, operator.factors.heads).blocks.append(kept)
        if not self._together:
            self._work_off()

    def _group(self, seen: Tensor, heads: int) -> _Group:
        for group in self._groups:
            if group.heads == heads and torch.equal(group.seen, seen):
                return group
        if sum(group.seen.numel() for group in self._groups) + seen.numel() > PATTERN_BYTES:
            self._work_off()
        self._groups.append(_Group(seen, heads))
        return self._groups[-1]

    def numbers(self) -> dict[int, NullNumbers]:
        """By block."""
        self._work_off()
        return self._found

    def _work_off(self) -> None:
        for group in self._groups:
            self._found |= _numbers(group, self._threshold)
        self._groups.clear()


def _numbers(group: _Group, threshold: float) -> dict[int, NullNumbers]:
    blocks, tokens = group.blocks, len(group.seen)
    roots = torch.stack([b.geometry.root for b in blocks])
    all_of = UniformOperators(
        group.seen,
        torch.stack([b.sources for b in blocks]),
        torch.stack([b.token_scale for b in blocks]),
        roots,
        torch.stack([b.arriving for b in blocks]),
    )
    products, correlations = all_of.head_products(), all_of.block_correlations()
    spectra = kronecker_spectrum(products, roots)
    nonzero = (all_of.nonzero_blocks() / tokens**2).tolist()
    found = {}
    for k, block in enumerate(blocks):
        norm = frobenius_norm(products[k], block.geometry.gram)
        filled = block.geometry.pattern.filled(block.sources.T.abs(), all_of.readers[k])
        found[block.index] = NullNumbers(
            effective_heads=effective_heads(spectra[k]),
            block_correlation=correlations[k],
            structural=filled / tokens**2,
            numerical=_numerical(group, block, all_of, k, threshold, norm, nonzero[k]) if norm > 0 else None,
            coupling=all_of.coupling(k),
            weighted=all_of.weighted(k),
        )
    return found


def _numerical(
    group: _Group, block: _Kept, all_of: UniformOperators, k: int, threshold: float, norm: float, nonzero: float
) -> ShareEstimate | None:
    """The share of entries above threshold times their root mean square, by the same token pairs as of W' itself."""
    scale, tokens = all_of.row_scale[k], len(group.seen)
    inner, outer = tokens * block.factors.width, tokens * block.factors.hidden_size
    cutoff = cutoff_of(inner, outer, norm, threshold)
    if are_counted(inner * outer):
        left = group.seen * scale[:, None] * block.sources.T[:, None]  # (heads, N, N)
        return exact_share(left.to(block.factors.value.dtype), block.geometry.maps(), cutoff)
    i, j = group.met
    rows, alive = scale.index_select(0, i), all_of.alive[k].index_select(0, j)
    hit = (alive & (rows > 0)).nonzero()[:, 0]
    vectors = block.sources.T.index_select(1, j.index_select(0, hit)) * rows.index_select(0, hit)  # (heads, n)
    return estimated(vectors.to(block.geometry.entries.dtype).T, block.geometry, cutoff, nonzero)

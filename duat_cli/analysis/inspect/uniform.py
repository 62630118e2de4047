"""The uniform null of a block's W': the same weights and scales, with H uniform over the tokens each row may see."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duat_cli.analysis.geometry import KEPT_HEADS, Geometry
from duat_cli.analysis.inspect.measured.entries import are_counted, cutoff_of, draws
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, OperatorNumbers, null_of
from duat_cli.analysis.inspect.operator import measure
from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.models.value_path.operator import AttentionOperator, PromptOperators
from duat_cli.operators.kronecker import effective_heads
from duat_cli.operators.sampling import ShareEstimate, exact_multiples, exact_share, sampled_shares
from duat_cli.operators.uniform import UniformOperators

PATTERN_BYTES = 1 << 26  # bytes of patterns kept until their blocks are computed


Key = tuple[int, int]
"""Index of a block, and of a prompt in its batch."""


@dataclass(frozen=True)
class _Kept:
    """The part of a block that its null needs, which is without H."""

    key: Key
    geometry: Geometry
    sources: Tensor  # s, (N, heads)
    token_scale: Tensor  # t, (N,)
    arriving: Tensor  # ‖Σ_h v_jh O_h‖², (N,)
    reasons: dict[str, str]  # why a number of W' itself is null


@dataclass
class _Group:
    """Blocks with equally many heads whose rows see the same tokens."""

    seen: Tensor  # (N, N)
    heads: int
    blocks: list[_Kept] = field(default_factory=list)

    def by_geometry(self) -> list[tuple[Geometry, list[int]]]:
        """Each geometry with the places of the blocks that share it, as a block under several prompts does."""
        found = by_key((id(block.geometry), place) for place, block in enumerate(self.blocks))
        return [(self.blocks[places[0]].geometry, places) for places in found.values()]

    @functools.cached_property
    def met(self) -> tuple[Tensor, Tensor]:
        """The drawn token pairs (i, j) in which i sees j, in order of drawing."""
        i, j = draws(len(self.seen), self.seen.device)
        met = self.seen.flatten().index_select(0, i * len(self.seen) + j).nonzero()[:, 0]
        return i.index_select(0, met), j.index_select(0, met)


class UniformNulls:
    """The nulls of the blocks of one prompt, or of a batch, computed together where their rows see the same tokens.

    together: False computes each null immediately, so that no block's factors are kept. Blocks with many heads are
    always computed immediately.
    """

    def __init__(self, threshold: float, *, together: bool = True) -> None:
        self._threshold, self._together = threshold, together
        self._groups: list[_Group] = []
        self._found: dict[int, dict[int, NullNumbers]] = defaultdict(dict)  # by prompt and block

    def add(self, index: int, operator: AttentionOperator, geometry: Geometry, numbers: OperatorNumbers) -> None:
        """Adds the block of that index, whose W' was measured."""
        gated = numbers.arriving is None or operator.head_gate is not None
        if gated or operator.offsets != (0,):  # other offsets: values of several tokens
            even = operator.uniform(numbers.seen)
            found = measure(even, geometry, threshold=self._threshold, spectrum=False, matrix=False)
            self._found[0][index] = null_of(found)
            return
        self._keep((index, 0), geometry, numbers, operator.source_scale.T.double(), operator.token_scale.double())

    def add_each(
        self, index: int, operators: PromptOperators, geometry: Geometry, numbers: Sequence[OperatorNumbers]
    ) -> None:
        """Adds the block of that index under every prompt of a batch."""
        scales = zip(operators.source_scale.mT.double(), operators.token_scale.double(), strict=True)
        for prompt, (own, (sources, scale)) in enumerate(zip(numbers, scales, strict=True)):
            self._keep((index, prompt), geometry, own, sources, scale)

    def _keep(
        self, key: Key, geometry: Geometry, numbers: OperatorNumbers, sources: Tensor, token_scale: Tensor
    ) -> None:
        scale = token_scale.expand(len(numbers.seen))
        kept = _Kept(key, geometry, sources, scale, needed(numbers.arriving).double(), numbers.reasons)
        self._group(numbers.seen, geometry.factors.heads).blocks.append(kept)
        if not self._together or geometry.factors.heads > KEPT_HEADS:
            self._work_off()

    def _group(self, seen: Tensor, heads: int) -> _Group:
        for group in self._groups:
            if group.heads == heads and (group.seen is seen or torch.equal(group.seen, seen)):
                return group
        if sum(group.seen.numel() for group in self._groups) + seen.numel() > PATTERN_BYTES:
            self._work_off()
        self._groups.append(_Group(seen, heads))
        return self._groups[-1]

    def numbers(self, prompt: int = 0) -> dict[int, NullNumbers]:
        """The nulls by block, for that prompt of a batch."""
        self._work_off()
        return self._found[prompt]

    def _work_off(self) -> None:
        for group in self._groups:
            for (index, prompt), numbers in _numbers(group, self._threshold).items():
                self._found[prompt][index] = numbers
        self._groups.clear()


def _numbers(group: _Group, threshold: float) -> dict[Key, NullNumbers]:
    blocks, tokens = group.blocks, len(group.seen)
    all_of = UniformOperators(
        group.seen,
        torch.stack([b.sources for b in blocks]),
        torch.stack([b.token_scale for b in blocks]),
        torch.stack([b.geometry.root for b in blocks]),
        torch.stack([b.arriving for b in blocks]),
    )
    spectra, norms, correlations = all_of.spectra(), all_of.frobenius_norms(), all_of.block_correlations()
    filled, numerical = _filled(group, all_of), _numerical(group, all_of, norms, threshold)
    return {
        block.key: NullNumbers(
            effective_heads=effective_heads(spectra[k]),
            block_correlation=correlations[k],
            structural=filled[k] / tokens**2,
            numerical=numerical[k] if norms[k] > 0 and "numerical" not in block.reasons else None,
            coupling=all_of.coupling(k),
            weighted=all_of.weighted(k),
            reasons=block.reasons,
        )
        for k, block in enumerate(blocks)
    }


def _filled(group: _Group, all_of: UniformOperators) -> list[float]:
    """Σ over the blocks of W' of the share of entries that can be nonzero, for each W'."""
    met = (all_of.readers * (all_of.sources != 0).any(dim=-1)).sum(dim=-1).tolist()
    patterns = [block.geometry.pattern for block in group.blocks]
    return [
        met[k] * p.share() if p.alike else p.filled(all_of.sources[k].T.abs(), all_of.readers[k])
        for k, p in enumerate(patterns)
    ]


def _numerical(
    group: _Group, all_of: UniformOperators, norms: list[float], threshold: float
) -> list[ShareEstimate | None]:
    """Share of entries above `threshold` times their root mean square, on the same token pairs as for W' itself."""
    tokens, found = len(group.seen), list[ShareEstimate | None]([None] * len(norms))
    nonzero = (all_of.nonzero_blocks() / tokens**2).tolist()
    for geometry, places in group.by_geometry():
        inner, outer = tokens * geometry.factors.width, tokens * geometry.factors.hidden_size
        cutoffs = [cutoff_of(inner, outer, norms[k], threshold) for k in places]
        each: list[ShareEstimate | None]
        if are_counted(inner * outer):
            each = [_counted(group.seen, all_of, k, geometry, c) for k, c in zip(places, cutoffs, strict=True)]
        else:
            each = _sampled(group, all_of, places, geometry, cutoffs, [nonzero[k] for k in places])
        for k, estimate in zip(places, each, strict=True):
            found[k] = estimate
    return found


def _counted(seen: Tensor, all_of: UniformOperators, k: int, geometry: Geometry, cutoff: float) -> ShareEstimate:
    rows, sources = seen * all_of.row_scale[k][:, None], all_of.sources[k]
    total = geometry.sorted_total
    alike = sources.mean(dim=-1, keepdim=True)
    if total is not None and bool(((sources - alike).abs() <= 8 * torch.finfo(total.dtype).eps * alike.abs()).all()):
        sizes = rows * alike[:, 0].abs()  # scales do not depend on heads, so blocks are multiples of the heads' sum
        return exact_multiples(sizes[sizes > 0], total, sizes.numel(), cutoff)
    left = rows * sources.T[:, None]  # (heads, N, N)
    return exact_share(left.to(geometry.factors.value.dtype), geometry.maps(), cutoff)


def _sampled(
    group: _Group,
    all_of: UniformOperators,
    places: list[int],
    geometry: Geometry,
    cutoffs: list[float],
    nonzero: list[float],
) -> list[ShareEstimate | None]:
    """Estimates from sampled entries. places: which of the group's blocks; cutoffs, nonzero: one for each of them."""
    i, j = group.met
    rows, alive = all_of.row_scale[places].index_select(1, i), all_of.alive[places].index_select(1, j)
    hit = alive & (rows > 0)
    if len(places) > 1 and not torch.equal(hit, hit[:1].expand_as(hit)):
        alone = zip(places, cutoffs, nonzero, strict=True)
        return [_sampled(group, all_of, [k], geometry, [c], [share])[0] for k, c, share in alone]
    chosen = hit[0].nonzero()[:, 0]
    sources = all_of.sources[places].mT.index_select(2, j.index_select(0, chosen))  # (places, heads, n)
    vectors = sources * rows.index_select(1, chosen)[:, None]
    return sampled_shares(vectors.to(geometry.entries.dtype).mT, geometry.entries, cutoffs, nonzero)

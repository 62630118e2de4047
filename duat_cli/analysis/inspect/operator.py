"""Statistics of one block's W' under a prompt or a batch of prompts: size, density, and how it couples tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.measured.entries import Pairs, are_counted, cutoff_of
from duat_cli.analysis.inspect.measured.gated import measure_gated
from duat_cli.analysis.inspect.measured.numbers import STREAMS, OperatorNumbers, row_pieces, spectral
from duat_cli.models.value_path.operator import AttentionOperator, PromptOperators
from duat_cli.operators.coupling import CouplingSums, OperatorSums, ValueSquares
from duat_cli.operators.kronecker import effective_heads, frobenius_norms, kronecker_spectrum
from duat_cli.operators.sampling import ShareEstimate, exact_share, sampled_shares


def measure(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    """All statistics of W' in one pass over the rows of H."""
    found = _measured(operator, geometry, threshold=threshold, spectrum=spectrum, matrix=matrix)
    if operator.streams:
        return replace(found, numerical=None, reasons=found.reasons | {"numerical": STREAMS})
    return found


def _measured(
    operator: AttentionOperator, geometry: Geometry, *, threshold: float, spectrum: bool, matrix: bool
) -> OperatorNumbers:
    if operator.gate is not None:
        return measure_gated(operator, geometry, threshold=threshold, spectrum=spectrum, matrix=matrix)
    sums = _Sums(geometry, operator.source_scale, operator.values, matrix=matrix)
    sums.add(row_pieces(operator.attention_chunks()))
    [numbers] = sums.numbers(operator.allowed, operator.token_scale, threshold)
    return replace(numbers, spectral_norm=spectral(operator)) if spectrum and numbers.frobenius_norm > 0 else numbers


def measure_each(operators: PromptOperators, geometry: Geometry, *, threshold: float) -> list[OperatorNumbers]:
    """All statistics of W' of every prompt of a batch."""
    sums = _Sums(geometry, operators.source_scale, operators.values)
    sums.add([(0, operators.attention)])
    return sums.numbers(operators.allowed, operators.token_scale, threshold)


class _Sums:
    """Sums over rows of H, from which the statistics follow. With several prompts, they are every tensor's first
    axis."""

    def __init__(self, geometry: Geometry, source_scale: Tensor, values: Tensor, *, matrix: bool = False) -> None:
        """source_scale: s, (heads, N); values: (heads, N, d); matrix: whether C is asked for."""
        *lead, _, self._tokens = source_scale.shape
        self._several = lead[0] if lead else None
        self._prompts = self._several or 1
        self._geometry, self._scale, self._matrix = geometry, source_scale, matrix
        self._brought = ValueSquares(values, geometry.factors.output)
        self._sums = OperatorSums(geometry.root, self._several, cancels=geometry.cancels)
        self._coupling = CouplingSums(2 * self._prompts)
        self._pairs: list[Pairs] = []  # one for all prompts if their nonzero blocks are the same
        self._squares: list[Tensor] = []
        self._seen: list[Tensor] = []
        # if it does not matter which heads reach a block, those that any head reaches are counted
        self._whole, self._filled = geometry.pattern.alike and bool(source_scale.all()), [0.0] * self._prompts
        factors = geometry.factors
        self._inner, self._outer = self._tokens * factors.width, self._tokens * factors.hidden_size
        self._left: list[Tensor] | None = [] if are_counted(self._inner * self._outer) else None  # Ĥ

    def add(self, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Adds all of t H, in pieces of (first row, some rows (heads, n, N))."""
        for start, every in pieces:
            seen = every.flatten(-2).abs().amax(dim=-2) > 0  # flattened, since along one axis this is twice as fast
            self._seen.append(seen.unflatten(-1, every.shape[-2:]))
            width = _width(self._seen[-1], start)
            attention = every[..., :width]
            scaled = attention * self._scale[..., None, :width]
            rows, alive = self._sums.add(scaled)
            kinds = torch.stack([rows, self._brought.of(attention)])
            self._coupling.add(kinds if self._several is None else kinds.flatten(0, 1), start)
            if not self._whole:
                for k, one in enumerate(self._each(scaled)):
                    self._filled[k] += self._geometry.pattern.filled(one.flatten(1).abs())
            if self._left is not None:
                self._left.append(nn.functional.pad(scaled, (0, self._tokens - width)))
            else:
                self._draw(scaled, alive, start)
            if self._matrix:
                self._squares.append(nn.functional.pad(rows, (0, self._tokens - width)))

    def numbers(self, allowed: Tensor | None, token_scale: Tensor, threshold: float) -> list[OperatorNumbers]:
        """The statistics of each prompt. allowed: as in `AttentionOperator`, the same for all; token_scale: t, (N,) or
        (1,)."""
        geometry, sums, count = self._geometry, self._sums, self._prompts
        seen = self._reached(allowed)
        norms = frobenius_norms(sums.head_products, geometry.gram)
        spectra = kronecker_spectrum(sums.head_products, geometry.root).reshape(count, -1)
        arriving = self._brought.of_sums().reshape(count, -1)
        filled = self._structural(seen, token_scale)
        numerical = self._numerical(norms, threshold)
        matrix = torch.cat(self._squares).sqrt() if self._matrix else None
        return [
            OperatorNumbers(
                frobenius_norm=norm,
                effective_heads=effective_heads(spectra[k]),
                block_correlation=correlation,
                spectral_norm=None,
                structural=filled[k] / self._tokens**2,
                numerical=numerical[k],
                coupling=self._coupling.numbers(k),
                weighted=self._coupling.numbers(count + k),
                seen=seen[k],
                arriving=arriving[k],
                matrix=matrix,
            )
            for k, (norm, correlation) in enumerate(zip(norms, sums.block_correlations(), strict=True))
        ]

    def _draw(self, scaled: Tensor, alive: Tensor, start: int) -> None:
        if self._several is not None and not torch.equal(alive, alive[:1].expand_as(alive)):
            parts = list(zip(scaled.unbind(), alive.unbind(), strict=True))
        else:
            parts = [(scaled, alive if self._several is None else alive[0])]
        self._pairs = self._pairs or [Pairs(self._tokens) for _ in parts]
        for pairs, part in zip(self._pairs, parts, strict=True):
            pairs.add(*part, start)

    def _reached(self, allowed: Tensor | None) -> list[Tensor]:
        """Which tokens each row may attend to, (N, N) for each prompt: what the mask leaves visible, even where a
        softmax underflows; without a mask, what some head reaches."""
        reached = torch.cat(self._seen, dim=-2).reshape(-1, self._tokens, self._tokens)
        if allowed is None:
            self._masked = [False] * self._prompts
            return list(reached)
        beyond = (reached & ~allowed).flatten(1).any(dim=1).tolist()
        self._masked = [not some for some in beyond]
        return [own if some else allowed for own, some in zip(reached, beyond, strict=True)]

    def _structural(self, seen: list[Tensor], token_scale: Tensor) -> list[float]:
        """Σ over the blocks of W' of the share of entries that can be nonzero, for each prompt."""
        pattern, scales = self._geometry.pattern, self._each(self._scale)
        met = [one & (t != 0)[:, None] for one, t in zip(seen, self._each(token_scale), strict=True)]
        if self._whole:
            return [int(torch.count_nonzero(one)) * pattern.share() for one in met]
        return [
            pattern.filled(scale.abs(), one.sum(dim=0)) if masked else filled
            for one, scale, masked, filled in zip(met, scales, self._masked, self._filled, strict=True)
        ]

    def _numerical(self, norms: list[float], threshold: float) -> list[ShareEstimate | None]:
        """Share of entries beyond the threshold, for each prompt; None for W' = 0."""
        geometry, nonzero = self._geometry, (self._sums.nonzero_blocks.reshape(-1) / self._tokens**2).tolist()
        cutoffs = [cutoff_of(self._inner, self._outer, norm, threshold) for norm in norms]
        found: list[ShareEstimate | None]
        if self._left is not None:
            left = self._each(torch.cat(self._left, dim=-2))
            found = [exact_share(one, geometry.maps(), cutoff) for one, cutoff in zip(left, cutoffs, strict=True)]
        else:
            vectors = [pairs.vectors(len(geometry.entries)) for pairs in self._pairs]
            if len(vectors) == 1:
                pairs = vectors[0].reshape(self._prompts, *vectors[0].shape[-2:])
                found = sampled_shares(pairs, geometry.entries, cutoffs, nonzero)
            else:
                each = zip(vectors, cutoffs, nonzero, strict=True)
                found = [sampled_shares(one[None], geometry.entries, [c], [share])[0] for one, c, share in each]
        return [one if norm > 0 else None for one, norm in zip(found, norms, strict=True)]

    def _each(self, x: Tensor) -> list[Tensor]:
        """The tensors of the single prompts."""
        return [x] if self._several is None else list(x.unbind())


def _width(seen: Tensor, start: int) -> int:
    """How many leading columns of the rows from `start` on, (n, N), are needed: tokens behind the last one that some
    row sees, as under a causal mask, add nothing to any sum. The diagonal is always kept."""
    if start + seen.shape[-2] >= seen.shape[-1]:
        return seen.shape[-1]
    columns = seen.any(dim=-2).nonzero()
    last = int(columns[:, -1].max()) + 1 if len(columns) else 0
    return max(last, start + seen.shape[-2])

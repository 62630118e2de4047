"""The entries of W' that can be nonzero, from the zeros of its factors alone.

Entry (a, b) of Σ_h ĥ_h V_h O_h is Σ_h ĥ_h Σ_d V_h[a, d] O_h[d, b]. It can be nonzero if some head with ĥ_h ≠ 0 has a
channel d with V_h[a, d] ≠ 0 and O_h[d, b] ≠ 0. Entries of the union over heads and channels are counted once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors

ROWS_AT_ONCE = 1024  # distinct patterns of rows compared with all columns at once


class EntryPattern:
    """The shares of a block's M x M entries that can be nonzero, by the set of heads that reach the block."""

    def __init__(self, factors: HeadFactors) -> None:
        self._factors = factors
        self._shares: dict[tuple[bool, ...], float] = {}

    def filled(self, sizes: Tensor, counts: Tensor | None = None) -> float:
        """Σ over blocks of the share of entries that can be nonzero.

        sizes: |ĥ| of each block, (heads, blocks). counts: how often each block stands in W', (blocks,); None: once.
        """
        weight = torch.ones_like(sizes[0], dtype=torch.float64) if counts is None else counts.double()
        if self.alike:
            return float(weight @ (sizes.amax(dim=0) > 0).double()) * self.share()
        if (shares := self._separate) is not None:
            return float(shares @ ((sizes > 0).double() @ weight))
        patterns, place = torch.unique((sizes > 0).T, dim=0, return_inverse=True)
        totals = weight.new_zeros(len(patterns)).index_add_(0, place, weight)
        return sum(self.share(row) * n for row, n in zip(patterns, totals.tolist(), strict=True))

    def share(self, heads: Tensor | None = None) -> float:
        """The share of the entries of Σ_h V_h O_h that can be nonzero. heads: the heads in the sum, (heads,) bool."""
        chosen = torch.ones(self._factors.heads, dtype=torch.bool) if heads is None else heads.cpu()
        key = tuple(chosen.tolist())
        if key not in self._shares:
            self._shares[key] = _share(self._factors, chosen.nonzero()[:, 0])
        return self._shares[key]

    @functools.cached_property
    def alike(self) -> bool:
        """Whether every head alone reaches all entries that the heads reach together."""
        if bool((self._factors.value != 0).all()) and bool((self._factors.output != 0).all()):
            return True
        alone = torch.eye(self._factors.heads, dtype=torch.bool)
        return self._separate is None and all(self.share(head) == self.share() for head in alone)

    @functools.cached_property
    def _separate(self) -> Tensor | None:
        """The share of each head, (heads,), where no two channels read the same row of V, so that no entry is reached
        twice; else None. It is for kernels that treat each of thousands of channels by itself, where every block has
        another set of heads."""
        value, output = self._factors.value != 0, self._factors.output != 0
        if self._factors.groups > 1 or int(value.sum(dim=(0, 2)).max()) > 1:
            return None
        reached = (value.sum(dim=1) * output.sum(dim=2)).sum(dim=1)
        return reached.double() / (self._factors.width * self._factors.hidden_size)


def _share(factors: HeadFactors, heads: Tensor) -> float:
    """The share of entries that can be nonzero in a sum over heads. heads: their numbers."""
    heads = heads.to(factors.value.device)
    value, output = factors.value[heads // factors.groups] != 0, factors.output[heads] != 0  # (k, M, d), (k, d, M)
    if not len(heads):
        return 0.0
    if bool(value.all()) and bool(output.all()):
        return 1.0
    live = value.any(dim=1) & output.any(dim=2)  # (k, d): channels with nonzero entries in both
    rows, columns = value.transpose(0, 1)[:, live], output.permute(2, 0, 1)[:, live]  # (M, channels) each
    rows, columns = rows[rows.any(dim=1)], columns[columns.any(dim=1)]
    if not len(rows) or not len(columns):
        return 0.0
    # Two sets of channels with more elements together than there are channels share one: then every entry is reached.
    if int(rows.sum(dim=1).min() + columns.sum(dim=1).min()) > int(live.sum()):
        return len(rows) * len(columns) / (factors.width * factors.hidden_size)
    return _reached(rows, columns) / (factors.width * factors.hidden_size)


def _reached(rows: Tensor, columns: Tensor) -> float:
    """How many pairs of a row and a column have a channel in common. Equal rows and equal columns are compared once."""
    rows, of_row = torch.unique(rows, dim=0, return_counts=True)
    columns, of_column = torch.unique(columns, dim=0, return_counts=True)
    other = columns.float().T
    reached = [(part.float() @ other > 0).double() @ of_column.double() for part in rows.split(ROWS_AT_ONCE)]
    return float(torch.cat(reached) @ of_row.double())

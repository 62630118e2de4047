"""One block under one prompt with all dynamic parameters held: what terms put into it, and the block without them.

`terms` gives each term's own part of the block's output. `whole` and `move` are the block as an affine map without
terms that are taken out at their place, and its linear part. The first looks at terms one by one, the second at all of
them together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from duat_cli.analysis.prune.terms.readings import activations, behind_layer, given_without, holds, move
from duat_cli.models.arrays import wide
from duat_cli.models.block.linears import matrix_of
from duat_cli.models.budgets import AT_ONCE
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.sites import BlockSites, Site, TermId, watching


class FrozenBlock:
    """Tensors are (items, N, M). A removal is of terms of this block call; None takes nothing out."""

    def __init__(self, run: BlockRun, sites: BlockSites) -> None:
        self._run, self._sites = run, sites
        self._given = [unit.output[None] for unit in run.units]
        self._neurons: dict[Site, Neurons] = {}

    def whole(self, items: Tensor, removal: Removal | None = None) -> Tensor:
        """The block's output, every σ giving what it gave, without the terms."""
        if removal is not None and removal.whole:
            return torch.cat([removal.bridge(item[None]) for item in items])
        given = self._given
        if removal is not None:
            given = given_without(self._run, [site for site in removal.masks if self._inside(site)], removal.edit)
        return self._replayed(items, given, removal)

    def move(self, changes: Sequence[Tensor], removal: Removal | None = None) -> None:
        """As of `readings.move`, the terms being gone."""
        if removal is None or not removal.whole:
            with self._without_outside(removal):
                move(self._run, changes)

    def term(self, term: TermId, removal: Removal) -> Tensor:
        """Part of one term, which is no neuron, in the block's output, (1, N, M). removal: of this term alone."""
        return self.whole(self._run.input) - self.whole(self._run.input, removal)

    def neurons(self, site: Site, removal: Removal) -> Neurons:
        """Those of one layer; removal: says what stands in for them, the same for every removal of a run."""
        if site not in self._neurons:
            values = activations(self._run, site)  # (N, I)
            if removal.means is not None:
                values = values - removal.means[removal.number, site].to(values)
            self._neurons[site] = Neurons(self, site, values, matrix_of(site.module, site.count).to(values))
        return self._neurons[site]

    def behind_layer(self, site: Site, values: Tensor) -> Tensor:
        """What the block makes of the output of the FFN's last layer, at its own output. values: (items, N, width)."""
        through = functools.partial(behind_layer, self._run, self._sites, site)
        base = through(torch.zeros_like(values[:1])).end
        step = AT_ONCE if self._run.parts.batched else 1
        return torch.cat([through(some).end - base for some in values.split(step)])

    def _replayed(self, items: Tensor, given: Sequence[Tensor], removal: Removal | None) -> Tensor:
        found = []
        with self._without_outside(removal):
            for some in items.split(AT_ONCE):
                found.append(self._run.replay(some, [g.expand(len(some), *g.shape[1:]) for g in given]).end)
        return torch.cat(found)

    def _inside(self, site: Site) -> bool:
        """Whether a nonlinear module, which a replay does not run, holds the site: of parts of an FFN alone."""
        return site.kind in ("neuron", "expert") and any(holds(unit.module, site) for unit in self._run.units)

    def _without_outside(self, removal: Removal | None) -> contextlib.AbstractContextManager[None]:
        """Replays take out what no nonlinear module holds."""
        if removal is None:
            return contextlib.nullcontext()
        return watching([site for site in removal.masks if not self._inside(site)], removal.edit)


class Neurons:
    """The neurons of one layer: neuron k adds a_k ⊗ w_k to the layer's output."""

    def __init__(self, block: FrozenBlock, site: Site, values: Tensor, weight: Tensor) -> None:
        self._block, self._site = block, site
        self.values, self.weight = values, weight  # (N, I), (I, width)

    @functools.cached_property
    def sizes(self) -> Tensor:
        """|a_k| |w_k| of every neuron, (I,)."""
        return wide(self.values).norm(dim=0) * wide(self.weight).norm(dim=1)

    def each(self, places: Tensor) -> Tensor:
        """The parts of single neurons in the block's output, (places, N, M)."""
        outer = self.values.T[places, :, None] * self.weight[places, None, :]
        return self._block.behind_layer(self._site, outer)

    def together(self, places: Tensor) -> Tensor:
        """The part of all of these, (1, N, M)."""
        values = torch.zeros_like(self.values)  # rather than rows of the weight, of which there may be many
        values[:, places] = self.values[:, places]
        return self._block.behind_layer(self._site, (values @ self.weight)[None])

"""One block under one prompt with all dynamic parameters held: the contributions of terms, and the block without them.

`whole` applies the block, an affine map, with terms removed at their place, and `move` applies its linear part;
`neurons` gives the contributions of a layer's neurons to the block's output, one by one and together.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import wide
from duat_cli.models.block.linears import matrix_of
from duat_cli.models.block.slots import parted
from duat_cli.models.budgets import AT_ONCE
from duat_cli.models.instrument.held import holding_norms
from duat_cli.models.instrument.records import Replay, UnitCall
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.adjoint import cross_call, cross_output
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.sites import BlockSites, Site, watching

_INSIDE = ("neuron", "expert")  # kinds whose terms may be inside a unit, which a replay does not run


class FrozenBlock:
    """A frozen block. Tensors are (items, N, M). A removal is of terms of this block call; None removes nothing."""

    def __init__(self, run: BlockRun, sites: BlockSites) -> None:
        self.run, self.sites = run, sites
        self._neurons: dict[Site, Neurons] = {}

    def replay(self, removal: Removal | None = None, *, react: bool = False) -> Replay:
        """Replay of the block on its own input. react: whether norms inside units that lose terms react."""
        return self._replayed(self.run.input, self._given(removal, react=react), removal)

    def whole(self, items: Tensor, removal: Removal | None = None) -> Tensor:
        """The block's output on `items` without the terms; every σ gives what it gave when recorded."""
        if removal is not None and removal.whole:
            return torch.cat([removal.bridge(item[None]) for item in items])
        given = self._given(removal)
        return torch.cat([self._replayed(some, given, removal).end for some in items.split(AT_ONCE)])

    def move(self, changes: Sequence[Tensor], removal: Removal | None = None) -> None:
        """Replaces changes of the block's input, in place, by the changes of its output, with the terms gone. A few at
        a time, so that there is never a second copy of all."""
        if removal is not None and removal.whole:
            return
        items = [item for change in changes for item in change.split(1)]
        with self._without_outside(removal):
            base = self.run.replay(torch.zeros_like(self.run.input)).end
            for start in range(0, len(items), AT_ONCE):
                some = items[start : start + AT_ONCE]
                ends = self.run.replay(torch.cat(some)).end
                for item, end in zip(some, ends, strict=True):
                    torch.sub(end, base[0], out=item[0])

    def neurons(self, site: Site, removal: Removal | None = None) -> Neurons:
        """The neurons of one layer. removal: gives the means that stand in for them; they are the same for every
        removal of a run, so the first one counts."""
        if site not in self._neurons:
            values = self._activations(site)  # (N, I)
            if removal is not None and removal.means is not None:
                values = values - removal.means[removal.number, site].to(values)
            self._neurons[site] = Neurons(self, site, values, matrix_of(site.module, site.count).to(values))
        return self._neurons[site]

    def behind_layer(self, site: Site, values: Tensor) -> Replay:
        """Replay of the block on zero streams, with `values`, (items, N, width), as output of the FFN's last layer, the
        one that reads the neurons of `site`."""

        def put(_: Site, tensor: Tensor, __: Tensor | None) -> Tensor:
            return values.reshape(tensor.shape).to(tensor).clone()  # blocks may write to it

        end = next(end for end in self.sites.of("ffn") if _holds(end.module, site))
        zero = torch.zeros_like(self.run.input).expand(len(values), -1, -1)
        # The values are put before any norm on the branch, which is held as everything is. Attention is not silenced:
        # the output of a layer in front of it goes on through its values.
        with watching([Site("ffn", end.module, "output", 1)], put):
            return self.run.replay(zero)

    def _activations(self, site: Site) -> Tensor:
        """Activations of the neurons, (N, I), from the unit's recorded input or output."""
        unit = next(u for u in self.run.units if u.module is site.unit)
        if not _holds(unit.module, site):  # the layer is behind the unit
            return wide(unit.output.reshape(-1, site.count))
        seen: list[Tensor] = []

        def see(_: Site, value: Tensor, __: Tensor | None) -> None:
            seen.append(value)

        with watching([site], see):
            unit.again()
        return wide(seen[0].reshape(-1, seen[0].shape[-1]))

    def _replayed(self, items: Tensor, given: Sequence[Tensor], removal: Removal | None) -> Replay:
        with self._without_outside(removal):
            return self.run.replay(items, [g.expand(len(items), *g.shape[1:]) for g in given])

    def _given(self, removal: Removal | None, *, react: bool = False) -> list[Tensor]:
        """Outputs of the units without the terms inside them. A replay does not run units, so they run here on their
        recorded inputs; norms in them are held unless `react`."""
        found, calls = [], Counter[nn.Module]()
        for unit in self.run.units:
            call = calls[unit.module]
            calls[unit.module] += 1
            sites = () if removal is None else removal.masks
            output, here = unit.output, [s for s in sites if self._inside(unit, s)]
            if any(site.routing is not None and site.module is unit.module for site in here):
                raise UnsupportedModelError(
                    "experts that are handed their router's weights cannot run apart from it; leave them out with "
                    "--granularity"
                )
            if removal is not None and here and self.run.parts.is_cross(unit.module):
                with watching(here, removal.edit):
                    output = cross_output(self.run, unit, cross_call(self.run).states)
            elif removal is not None and here:
                norms = contextlib.nullcontext() if react else holding_norms(self.run, unit.module, call)
                with watching(here, removal.edit), norms:
                    output = parted(unit.again())[0]
            found.append(output[None])
        return found

    def _inside(self, unit: UnitCall, site: Site) -> bool:
        """Whether the site is inside this unit, which a replay does not run; of attention, heads of cross-attention."""
        kinds = ("head",) if self.run.parts.is_cross(unit.module) else _INSIDE
        return site.kind in kinds and _holds(unit.module, site)

    def _without_outside(self, removal: Removal | None) -> contextlib.AbstractContextManager[None]:
        """A context in which replays remove those terms that are not inside a unit."""
        if removal is None:
            return contextlib.nullcontext()
        outside = [s for s in removal.masks if not any(self._inside(unit, s) for unit in self.run.units)]
        return watching(outside, removal.edit)


class Neurons:
    """The neurons of one layer: neuron k adds a_k ⊗ w_k to the layer's output."""

    def __init__(self, block: FrozenBlock, site: Site, values: Tensor, weight: Tensor) -> None:
        self.through = functools.partial(block.behind_layer, site)
        self.values, self.weight = values, weight  # (N, I), (I, width)
        self._at_once = AT_ONCE if block.run.parts.batched else 1

    @functools.cached_property
    def base(self) -> Replay:
        """Replay of the block with zero output of the layer."""
        return self.through(self.values.new_zeros(1, len(self.values), self.weight.shape[1]))

    @functools.cached_property
    def sizes(self) -> Tensor:
        """|a_k| |w_k| of every neuron, (I,)."""
        return wide(self.values).norm(dim=0) * wide(self.weight).norm(dim=1)

    def each(self, places: Tensor) -> Tensor:
        """Contributions of single neurons to the block's output, (places, N, M)."""
        return self._carried(self.values.T[places, :, None] * self.weight[places, None, :])

    def together(self, places: Tensor) -> Tensor:
        """Contribution of all these neurons together, (1, N, M)."""
        values = torch.zeros_like(self.values)  # zeros instead of a copy of rows of the weight, which may be many
        values[:, places] = self.values[:, places]
        return self._carried((values @ self.weight)[None])

    def _carried(self, values: Tensor) -> Tensor:
        """Contributions of layer outputs to the block's output, (items, N, M). values: (items, N, width)."""
        return torch.cat([self.through(some).end - self.base.end for some in values.split(self._at_once)])


def _holds(module: nn.Module, site: Site) -> bool:
    """Whether the site's module is this module or inside it."""
    return any(site.module is inner for inner in module.modules())

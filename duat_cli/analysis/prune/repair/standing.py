"""Biases that stand in for removed neurons and heads: the mean of each, passed through the layer that reads it.

A layer y = W x + b without the inputs R, which are replaced by their means m, gives W_K x_K + (b + W_R m_R): the same
layer without these inputs and with another bias (An et al. 2024, FLAP's bias compensation). A file can hold that where
the layer has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.repair.consumers import READ, Consumer, consumers
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.sites import Site, Sites, TermId, find_sites


def biases(
    model: nn.Module, ablator: Ablator, terms: Sequence[TermId], dtype: torch.dtype
) -> dict[nn.Parameter, Tensor]:
    """New parameters of the layers that read the terms, neurons and heads: weights of the terms are zero, and the bias
    holds their means; rounded to `dtype`. Raises UnsupportedModelError where a mean cannot be put into a bias."""
    assert ablator.means is not None
    gone, values = ablator.removals(terms), dict[nn.Parameter, Tensor]()
    sites = {number: list(removal.masks) for number, removal in gone.items()}
    for number, one in _layers(model, ablator.structure, ablator.sites, sites):
        values |= _biased(one, gone[number], ablator.means[number, one.site], dtype)
    return values


def require_biases(
    model: nn.Module, structure: ModelStructure, kinds: Sequence[Kind], like: Mapping[str, Tensor] | None
) -> None:
    """Raises UnsupportedModelError where the layers that read terms of these kinds cannot hold their means. like: as
    for `discover`."""
    sites = find_sites(structure, like)
    every = {
        number: [site for kind in kinds for site in sites[module].of(kind)]
        for number, module in enumerate(structure.calls)
    }
    _layers(model, structure, sites, every)


def _layers(
    model: nn.Module, structure: ModelStructure, sites: Sites, wanted: Mapping[int, Sequence[Site]]
) -> list[tuple[int, Consumer]]:
    """The layers that read the wanted sites, with the number of the block; each has a bias. Raises
    UnsupportedModelError where one has none, or where there is no such layer."""
    found, left = consumers(model, structure, sites)
    layers = []
    for number, here in wanted.items():
        known = {one.site: one for one in found[number]}
        for site in here:
            where = f"--apply with --ablate mean: block {number}: {READ[site.kind]}"
            if site not in known:
                why = next((one.why for one in left if one.what.startswith(READ[site.kind])), "it is no linear layer")
                raise UnsupportedModelError(f"{where} cannot hold the means: {why}")
            if known[site].bias is None:
                raise UnsupportedModelError(
                    f"{where} has no bias that could hold the means of what is removed; use --ablate zero"
                )
            layers.append((number, known[site]))
    return layers


def _biased(one: Consumer, removal: Removal, mean: Tensor, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """New parameters of one layer. mean: of every input."""
    kept = one.kept(removal)
    matrix = one.weight.detach().movedim(one.axis, 0).double()
    gone = torch.ones(one.width, dtype=torch.bool, device=matrix.device)
    gone[kept] = False
    change = matrix.new_zeros(len(kept) + 1, matrix.shape[1])
    change[-1] = mean.to(matrix)[gone] @ matrix[gone]
    return one.changed(change, kept, dtype)

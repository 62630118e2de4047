"""How many parameters belong to a term: the saving from removing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import or_reason
from duat_cli.kinds import Kind
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.edits.heads import HeadLayers, head_layers
from duat_cli.models.edits.neurons import NeuronLayers, neuron_layers
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.terms.feedforward import find_feedforward
from duat_cli.models.terms.sites import BlockSites, Site


@dataclass(frozen=True)
class BlockParameters:
    """The numbers of parameters of the terms of one block."""

    each: Mapping[Kind, Tensor]
    """Parameters of each term, (terms of the kind,) float64. Neurons, heads and experts have equal shares of the layers
    that hold them. A head also has a share of keys and values, which can only be removed with all heads that share
    them."""
    group: int
    """Number of neighbouring heads that share a key and value head; 1 for heads of a mixer without softmax."""
    neurons: NeuronLayers | str
    """The rows of the neurons of its one FFN in the layers, or the reason why they cannot be cut out."""
    heads: HeadLayers | str
    """The rows of groups of heads in the layers, or the reason why they cannot be cut out."""


def block_parameters(parts: BlockParts, sites: BlockSites, written: Trace) -> BlockParameters:
    """The numbers of one block, by shapes alone, except that layers of neurons are found from a trace; the block's
    weights are in memory."""
    layers_of = functools.cache(functools.partial(_layers_of, parts, written))
    each: dict[Kind, list[float]] = {
        kind: [share for site in sites.of(kind) for share in [_share(parts, site, layers_of)] * site.count]
        for kind in ("neuron", "head", "expert", "ffn", "attention")
    }
    each["block"] = [_count(parts.module.parameters())]
    heads, calls = sites.of("head"), written.attention_of(parts.attention)
    shared = calls[0].value.shape[1] if calls else 0
    group = heads[0].count // shared if heads and shared and heads[0].count % shared == 0 else 1
    found = {kind: torch.tensor(shares, dtype=torch.float64) for kind, shares in each.items()}
    units = parts.feedforward
    neurons = layers_of(units[0]) if len(units) == 1 else f"it has {len(units)} FFNs"
    return BlockParameters(found, group, neurons, or_reason(lambda: head_layers(parts, written)))


def _share(parts: BlockParts, site: Site, layers_of: Callable[[nn.Module], NeuronLayers | str]) -> float:
    """The parameters of one term of the site. layers_of: `_layers_of` as a function of the unit alone."""
    if site.kind == "expert":
        own = site.module.parameters(recurse=False)
        return _count(p for p in own if p.ndim >= 2 and p.shape[0] == site.count) / site.count
    if site.kind in ("head", "attention"):
        attentions = parts.attending[-1:] if parts.in_cross(site.module) else parts.attention
        modules = [m for attention in attentions for m in parts.modules_of(attention)]
        held = {p for module in modules for p in module.parameters(recurse=False)}
        return _count(held | set(site.module.parameters())) / site.count
    unit = site.unit or next((u for u in parts.units if site.module in set(u.modules())), None)
    if site.kind == "neuron" and unit is not None:
        layers = layers_of(unit)
        if not isinstance(layers, str):
            return float(layers.each)
    modules = [site.module] if unit is None else [unit, site.module]
    return _count({p for module in modules for p in module.parameters()}) / site.count


def _layers_of(parts: BlockParts, written: Trace, unit: nn.Module) -> NeuronLayers | str:
    """The layers of a unit's neurons, or why it has no form or no weights of its own. Proving takes the longest."""
    return or_reason(lambda: neuron_layers(find_feedforward(unit, written, parts.module)))


def _count(parameters: Iterable[nn.Parameter]) -> float:
    return float(sum(p.numel() for p in parameters))

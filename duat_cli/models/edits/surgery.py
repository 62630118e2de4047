"""Parameters with other values for a limited time, and terms taken out of a model's weights and put back: columns are
zeroed, blocks cut out.

Everything happens in place, on the loaded model, inside context managers; only values that change are copied.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from duat_cli.compat.torch import children_of, is_list
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import applied_axis
from duat_cli.models.discovery.modality import is_pair
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.holding import holding
from duat_cli.models.terms.sites import BlockSites, Site, Sites, TermId, by_block

_BLOCKS = "num_hidden_layers", "num_layers"  # longcat_flash has two attentions a block, and counts both in the first
_DECODERS = "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"
_PER_LAYER = re.compile(r"layer|block|type|pattern")


@contextlib.contextmanager
def exchanged(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """While active, the parameters hold these tensors, of their shapes and dtypes; afterwards their former ones.
    Nothing is copied, so other views of a parameter's memory do not change with it."""
    with contextlib.ExitStack() as stack:
        for parameter, value in values.items():
            stack.enter_context(holding(parameter, data=value))
        yield


# -- zeroing -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def zeroed(model: nn.Module, structure: ModelStructure, sites: Sites, terms: Sequence[TermId]) -> Iterator[None]:
    """While active, the weights that make the terms' contributions are zero; afterwards the model is as it was.

    Raises UnsupportedModelError where a weight is also used elsewhere, so that zeroing it would remove more.
    """
    by_call = _by_call(structure, terms)
    uses = _uses(model)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, mask of its zeroed entries, their former values
    try:
        with torch.no_grad():
            for call, here in by_call.items():
                for parameter, mask in _slices(sites[structure.calls[call]], here):
                    _refuse_tied(uses, parameter, call)
                    kept.append((parameter, mask, parameter[mask].clone()))
                    parameter[mask] = 0
        yield
    finally:
        with torch.no_grad():
            for parameter, mask, values in reversed(kept):
                parameter[mask] = values


def zeroed_parameters(model: nn.Module, structure: ModelStructure, sites: Sites, terms: Sequence[TermId]) -> int:
    """How many parameters `zeroed` sets to zero, by their shapes alone. A block that runs several times counts once.

    Raises UnsupportedModelError as `zeroed` does.
    """
    by_call, uses, found = _by_call(structure, terms), _uses(model), 0
    for module, call in {structure.calls[call]: call for call in by_call}.items():
        for site, numbers in _by_site(sites[module], by_call[call]).items():
            parameters = _zeroed_in(sites[module], site)
            for parameter in parameters:
                _refuse_tied(uses, parameter, call)
            share = len(set(numbers)) / site.count if site.place in ("input", "routing") else 1
            found += round(share * sum(p.numel() for p in parameters))
    return found


def _uses(model: nn.Module) -> Counter[Tensor]:
    """The number of places in the model at which each parameter stands."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def _refuse_tied(uses: Counter[Tensor], parameter: Tensor, call: int) -> None:
    if uses[parameter] > 1:
        raise UnsupportedModelError(f"block {call}: a weight to be zeroed is tied to another place of the model")


def _zeroed_in(sites: BlockSites, site: Site) -> list[Tensor]:
    """The parameters in which each term of a site has an equal part."""
    if site.place == "input":
        assert isinstance(site.module.weight, Tensor)
        return [site.module.weight]
    return _of_experts(site) if site.place == "routing" else _made_by(sites, site)


def _by_call(structure: ModelStructure, terms: Sequence[TermId]) -> Mapping[int, list[TermId]]:
    """The terms by block call. Calls of one block module share its weights, so UnsupportedModelError is raised unless
    all of them lose the same terms."""
    found = by_block(terms)
    for call, here in found.items():
        mine = {(t.kind, t.index) for t in here}
        for other, module in enumerate(structure.calls):
            if module is structure.calls[call] and mine != {(t.kind, t.index) for t in found.get(other, [])}:
                raise UnsupportedModelError(
                    f"blocks {min(call, other)} and {max(call, other)} are one module: a term cannot be taken out of "
                    "the weights of one of them alone"
                )
    return found


def _slices(sites: BlockSites, terms: Sequence[TermId]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (parameter, boolean mask along its axes) for all weights to be zeroed in one block."""
    for site, numbers in _by_site(sites, terms).items():
        for parameter in _zeroed_in(sites, site):
            if site.place == "input":
                yield parameter, _columns(site, numbers)
            else:
                mask = torch.zeros_like(parameter, dtype=torch.bool)
                mask[numbers if site.place == "routing" else slice(None)] = True
                yield parameter, mask


def _by_site(sites: BlockSites, terms: Sequence[TermId]) -> dict[Site, list[int]]:
    """The sites of the terms of one block, with the terms' numbers there; a whole block stands for all its branches."""
    chosen: dict[Site, list[int]] = defaultdict(list)
    for term in terms:
        if term.kind == "block":
            for kind in ("attention", "ffn"):
                for site in sites.of(kind):
                    chosen[site] = [0]
            continue
        site, number = sites.find(term)
        chosen[site].append(number)
    return chosen


def _columns(site: Site, numbers: list[int]) -> Tensor:
    """The input features of a linear layer that belong to the terms, as a mask of its weight."""
    weight = site.module.weight
    assert isinstance(weight, Tensor)
    axis = applied_axis(site.module)
    keep = torch.zeros(site.count, dtype=torch.bool)
    keep[numbers] = True
    features = keep.repeat_interleave(weight.shape[axis] // site.count).to(weight.device)
    return (features[:, None] if axis == 0 else features[None]).expand(weight.shape)


def _of_experts(site: Site) -> list[Tensor]:
    _refuse_weightless(site)
    own = site.module.parameters(recurse=False)
    return [parameter for parameter in own if parameter.shape[0] == site.count and parameter.ndim >= 2]


def _refuse_weightless(site: Site) -> None:
    """Refuses experts without weights: an identity (longcat_flash) passes its input on, whatever is zeroed.

    A test by running the model may miss it, because a short input may not be routed there.
    """
    if any(p.ndim >= 3 and p.shape[0] != site.count for p in site.module.parameters(recurse=False)):
        raise UnsupportedModelError(
            f"not each of the {site.count} experts has weights of its own that could be zeroed (an identity expert "
            "has none)"
        )


def _made_by(sites: BlockSites, site: Site) -> list[Tensor]:
    """The parameters that make a branch's output: those of the last linear layer, or of a whole routed unit."""
    inside = set(site.module.modules())
    for routed in (s for s in sites.sites if s.place == "routing" and s.module in inside):
        _refuse_weightless(routed)
    last = [s.module for s in sites.sites if s.kind == "neuron" and s.module in inside]
    return [parameter for module in last or [site.module] for parameter in module.parameters()]


# -- cutting -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_blocks(model: Any, structure: ModelStructure, numbers: Sequence[int]) -> Iterator[None]:
    """While active, the model is without these blocks in its list and its config; afterwards it is as it was."""
    holder = _holder(structure)
    keep = [k for k in range(len(structure.calls)) if k not in set(numbers)]
    if not keep:
        raise UnsupportedModelError("no block would be left")
    before, config = dict(children_of(holder)), model.config
    try:
        children_of(holder).clear()
        children_of(holder).update({str(place): structure.calls[k] for place, k in enumerate(keep)})
        decodes = is_pair(model) and structure.stack in set(model.get_decoder().modules())
        cut = config_without_decoders if decodes else config_without_blocks
        model.config = cut(config, len(structure.calls), keep)
        yield
    finally:
        children_of(holder).clear()
        children_of(holder).update(before)
        model.config = config


def _holder(structure: ModelStructure) -> nn.Module:
    """The list that holds exactly the blocks, in call order. Raises UnsupportedModelError where there is none."""
    for module in structure.stack.modules():
        if is_list(module) and list(module.children()) == list(structure.calls):
            return module
    raise UnsupportedModelError("its blocks are no plain list, each run once, so none can be cut out")


def config_without_blocks(config: Any, blocks: int, keep: Sequence[int]) -> Any:
    """A copy of the config with fewer blocks: their number, every list with one entry per block, and settings declared
    for single blocks."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    stated = [name for name in _BLOCKS if getattr(text, name, None) == blocks]
    if not stated:
        raise UnsupportedModelError("its config does not state the number of its blocks")
    lists = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == blocks and _PER_LAYER.search(name)
    }
    declared = {int(k): value for k, value in (text.to_dict().get("per_layer_config") or {}).items()}
    if declared:  # its keys must be numbers of existing blocks at any time
        text.per_layer_config = None
    setattr(text, stated[0], len(keep))
    for name, value in lists.items():
        setattr(text, name, [value[k] for k in keep])
    if declared:
        text.per_layer_config = {place: declared[k] for place, k in enumerate(keep) if k in declared}
    return config


def config_without_decoders(config: Any, blocks: int, keep: Sequence[int]) -> Any:
    """A copy of the config of an encoder-decoder with fewer blocks in its decoder, as `config_without_blocks`: in the
    decoder's own config, or by the number of its blocks."""
    config = copy.deepcopy(config)
    if isinstance(own := getattr(config, "decoder", None), PreTrainedConfig):
        config.decoder = config_without_blocks(own, blocks, keep)
        return config
    stated = [name for name in _DECODERS if getattr(config, name, None) == blocks]
    if not stated:
        raise UnsupportedModelError("its config does not state the number of its decoder's blocks")
    for name in stated:
        setattr(config, name, len(keep))
    return config

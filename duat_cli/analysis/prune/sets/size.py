"""What a checkpoint saves without a set of terms: what can leave the file, and what is only zeroed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from duat_cli.analysis.prune.sets.cut import shared_groups, shared_neurons, without_heads_of, without_neurons_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.heads import HeadLayers, require_stated
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.edits.surgery import zeroed_parameters
from duat_cli.models.terms.sites import BlockSites, TermId
from duat_cli.results.prune.sets import SetSize
from duat_cli.text import one_line


def set_size(
    loaded: LoadedModel,
    structure: ModelStructure,
    sites: Mapping[nn.Module, BlockSites],
    parameters: Mapping[nn.Module, BlockParameters],
    terms: Sequence[TermId],
) -> SetSize:
    """By shapes alone: of the way to write the set that leaves out most, if the architecture can state it."""
    calls = structure.calls
    blocks = [term.block for term in terms if term.kind == "block"]
    rest = tuple(term for term in terms if term.kind != "block")
    shared = len(set(calls)) != len(calls)
    groups = {} if shared else _groups(loaded.model, calls, parameters, blocks, rest)
    sizes = {k: (parameters[calls[k]].group, numbers) for k, numbers in groups.items()}
    rest = without_heads_of(sizes, rest)
    cut, _ = shared_neurons(len(calls), blocks, rest)
    each = {call: parameters[calls[call]].neuron for call in cut}
    known = [one for one in each.values() if one is not None]
    if shared or len(known) < len(each):
        cut = {}
    removed = sum(p.numel() for k in blocks for p in calls[k].parameters())
    removed += sum(one * len(cut[call]) for call, one in each.items() if call in cut and one is not None)
    removed += sum(len(numbers) * _layers(parameters[calls[k]]).each for k, numbers in groups.items())
    zeroed, reasons = None, {}
    try:
        zeroed = zeroed_parameters(structure, sites, without_neurons_of(cut, rest))
    except UnsupportedModelError as fault:
        reasons["parameters_zeroed"] = one_line(str(fault), 200)
    return SetSize(
        terms_removed=len(blocks) + sum(map(len, cut.values())) + sum(size * len(n) for size, n in sizes.values()),
        parameters_removed=removed,
        parameters_zeroed=zeroed,
        bytes_removed=removed * (most_stored(loaded.files) or loaded.model.dtype).itemsize,
        reasons=reasons,
    )


def _groups(
    model: nn.Module,
    calls: Sequence[nn.Module],
    parameters: Mapping[nn.Module, BlockParameters],
    blocks: Sequence[int],
    terms: Sequence[TermId],
) -> dict[int, tuple[int, ...]]:
    """Key and value heads of every attention that stays that leave with their heads, if the config can state it."""
    if not any(term.kind == "head" for term in terms):
        return {}
    stay = [k for k in range(len(calls)) if k not in set(blocks) and len(parameters[calls[k]].each["head"])]
    layers = [parameters[calls[k]].heads for k in stay]
    proved = [one for one in layers if isinstance(one, HeadLayers)]
    if len(proved) < len(layers):
        return {}
    found = shared_groups({k: (one.heads, one.groups) for k, one in zip(stay, proved, strict=True)}, terms)
    try:
        if found:
            require_stated(model, proved)
    except UnsupportedModelError:
        return {}
    return found


def _layers(block: BlockParameters) -> HeadLayers:
    assert isinstance(block.heads, HeadLayers)
    return block.heads

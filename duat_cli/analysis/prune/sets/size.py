"""What a checkpoint saves without a set of terms: what can leave the file, and what is only zeroed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from duat_cli.analysis.prune.sets.cut import shared_neurons, without_neurons_of
from duat_cli.analysis.prune.terms.certified import BlockBounds
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.surgery import zeroed_parameters
from duat_cli.models.terms.sites import BlockSites, TermId
from duat_cli.results.prune.sets import SetSize
from duat_cli.text import one_line


def set_size(
    loaded: LoadedModel,
    structure: ModelStructure,
    sites: Mapping[nn.Module, BlockSites],
    bounds: Sequence[BlockBounds],
    terms: Sequence[TermId],
) -> SetSize:
    """By shapes alone: of the way to write the set that leaves out most, if the architecture can state it."""
    calls = structure.calls
    blocks = [term.block for term in terms if term.kind == "block"]
    rest = [term for term in terms if term.kind != "block"]
    cut, _ = shared_neurons(len(calls), blocks, rest)
    each = {call: _each(bounds[call]) for call in cut}
    known = [one for one in each.values() if one is not None]
    if len(set(calls)) != len(calls) or len(known) < len(each):
        cut = {}
    removed = sum(p.numel() for k in blocks for p in calls[k].parameters())
    removed += sum(one * len(cut[call]) for call, one in each.items() if call in cut and one is not None)
    zeroed, reasons = None, {}
    try:
        zeroed = zeroed_parameters(structure, sites, without_neurons_of(cut, rest))
    except UnsupportedModelError as fault:
        reasons["parameters_zeroed"] = one_line(str(fault), 200)
    return SetSize(
        terms_removed=len(blocks) + sum(map(len, cut.values())),
        parameters_removed=removed,
        parameters_zeroed=zeroed,
        bytes_removed=removed * (most_stored(loaded.files) or loaded.model.dtype).itemsize,
        reasons=reasons,
    )


def _each(block: BlockBounds) -> int | None:
    """Parameters that go with one neuron of a block; None where a config could not state its width."""
    units = block.units
    return units[0].each if len(units) == 1 else None

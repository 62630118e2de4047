"""What a checkpoint saves without a set of terms: what can leave the file, and what is only zeroed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import nn

from duat_cli.analysis.prune.sets.cut import Parts, shared_parts, without_terms
from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.kinds import Kind
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.cutting import Layers, require_plain, require_stated
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.edits.surgery import without_blocks, zeroed_parameters
from duat_cli.models.terms.sites import Sites, TermId
from duat_cli.results.prune.sets import SetSize
from duat_cli.text import one_line


def set_size(
    loaded: LoadedModel,
    structure: ModelStructure,
    sites: Sites,
    parameters: Mapping[nn.Module, BlockParameters],
    terms: Sequence[TermId],
) -> SetSize:
    """By shapes alone: of the way to write the set that leaves out most, if the architecture can state it.

    UnsupportedModelError where weights of blocks are made of other parameters, which stand in no such file.
    """
    for block in structure.blocks:
        require_plain(block.parts.module)
    calls, each = structure.calls, [parameters[module] for module in structure.calls]
    blocks = [term.block for term in terms if term.kind == "block"]
    rest = tuple(term for term in terms if term.kind != "block")
    removed, count, shared = 0, 0, len(set(calls)) != len(calls)
    with contextlib.ExitStack() as stack:  # what a config can state is asked of the blocks that stay
        try:
            if blocks:
                stack.enter_context(without_blocks(loaded.model, structure, blocks))
        except UnsupportedModelError:
            blocks, rest, shared = [], tuple(terms), True
        stay = [] if shared else [k for k in range(len(each)) if k not in set(blocks)]
        found: dict[Kind, dict[int, Layers | str | None]] = {
            "head": {k: each[k].heads for k in stay if len(each[k].each["head"])},
            "neuron": {k: each[k].neurons for k in stay},
        }
        for kind, layers in found.items():
            proved = {k: one for k, one in layers.items() if isinstance(one, Layers)}
            cut = _leaving(loaded.model, kind, proved, rest) if len(proved) == len(layers) else {}
            removed += sum(len(numbers) * proved[k].each for k, numbers in cut.items())
            count += sum(len(numbers) * proved[k].size for k, numbers in cut.items())
            rest = without_terms(kind, proved, cut, rest)
    removed += sum(p.numel() for k in blocks for p in calls[k].parameters())
    zeroed = or_reason(lambda: zeroed_parameters(structure, sites, rest))
    return SetSize.explained(
        one_line(zeroed, 200) if isinstance(zeroed, str) else "",
        terms_removed=len(blocks) + count,
        parameters_removed=removed,
        parameters_zeroed=None if isinstance(zeroed, str) else zeroed,
        bytes_removed=removed * (most_stored(loaded.files) or loaded.model.dtype).itemsize,
    )


def _leaving(model: nn.Module, kind: Kind, layers: Mapping[int, Layers], terms: Sequence[TermId]) -> Parts:
    """Parts of every one of these layers that leave the file, if the config can state it. layers: by block."""
    found = shared_parts(kind, layers, terms)
    if found and isinstance(or_reason(lambda: require_stated(model, [*layers.values()])), str):
        return {}
    return found

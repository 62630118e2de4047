"""How much a checkpoint without a set of terms saves: parameters that can leave the file, and those only zeroed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import nn

from duat_cli.analysis.prune.sets.cut import Cut, cuts_of
from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.kinds import KINDS, Kind
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.cutting import is_stated, require_plain, require_stated
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
    """Size of what is saved, by shapes alone, for the way to write the set that removes most and a config can state.

    Raises UnsupportedModelError where weights of blocks are computed from other parameters, as no such file holds them.
    """
    for block in structure.blocks:
        require_plain(block.parts.module)
    cuts = cuts_of(structure, parameters, terms)
    known = ((one, _left_with_blocks(loaded.headed, structure, one)) for one in cuts)
    cut, removed = next((one, left) for one, left in known if left is not None)
    parts, kinds = [*cut.heads, *cut.neurons], sorted({term.kind for term in terms}, key=KINDS.index)
    removed += sum(len(numbers) * layers.each for layers, numbers in parts)
    zeroed = or_reason(lambda: zeroed_parameters(loaded.headed, structure, sites, cut.zeroed))
    return SetSize.explained(
        one_line(zeroed, 200) if isinstance(zeroed, str) else "",
        terms_removed=len(cut.blocks) + sum(len(numbers) * layers.size for layers, numbers in parts),
        parameters_removed=removed,
        parameters_zeroed=None if isinstance(zeroed, str) else zeroed,
        bytes_removed=removed * (most_stored(loaded.files) or loaded.model.dtype).itemsize,
        uniform_leaves=[kind for kind in kinds if _uniform_leaves(loaded.headed, structure, parameters, kind)],
    )


def _uniform_leaves(
    model: nn.Module, structure: ModelStructure, parameters: Mapping[nn.Module, BlockParameters], kind: Kind
) -> bool:
    """Whether one part of this kind can leave every layer that has some: a set that --uniform chooses then saves."""
    first: list[TermId] = []
    for k in range(len(structure.calls)):
        held = parameters[structure.block(k).parts.module]
        layers = held.heads if kind == "head" else held.neurons
        if kind in ("head", "neuron") and not isinstance(layers, str):
            first += [TermId(kind, k, i) for i in range(layers.size)]
    cuts = cuts_of(structure, parameters, first)
    return any((one.heads or one.neurons) and _left_with_blocks(model, structure, one) is not None for one in cuts)


def _left_with_blocks(model: nn.Module, structure: ModelStructure, cut: Cut) -> int | None:
    """Parameters that leave with the cut's blocks, without those shared by blocks that stay; None where no config can
    state what the cut leaves. Blocks are cut first, then parts of those that stay."""
    before = parameter_count(model)
    try:
        with contextlib.ExitStack() as stack:
            if cut.blocks:
                stack.enter_context(without_blocks(model, structure, cut.blocks))
                if not is_stated(model):  # the config makes kinds of blocks by their number
                    return None
            for parts in filter(None, (cut.heads, cut.neurons)):
                require_stated(model, [layers for layers, _ in parts])
            return before - parameter_count(model)
    except UnsupportedModelError:
        return None


def parameter_count(model: nn.Module) -> int:
    """How many parameters a model has; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())

"""What a checkpoint saves without a set of terms: what can leave the file, and what is only zeroed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import nn

from duat_cli.analysis.prune.sets.cut import shared_groups, shared_neurons, without_heads_of, without_neurons_of
from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.heads import HeadLayers, require_stated
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.edits.surgery import NeuronLayers, require_width, without_blocks, zeroed_parameters
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
    """By shapes alone: of the way to write the set that leaves out most, if the architecture can state it."""
    calls, each = structure.calls, [parameters[module] for module in structure.calls]
    blocks = [term.block for term in terms if term.kind == "block"]
    rest = tuple(term for term in terms if term.kind != "block")
    shared = len(set(calls)) != len(calls)
    with contextlib.ExitStack() as stack:  # what a config can state is asked of the blocks that stay
        try:
            if blocks:
                stack.enter_context(without_blocks(loaded.model, structure, blocks))
        except UnsupportedModelError:
            blocks, rest, shared = [], tuple(terms), True
        groups = {} if shared else _groups(loaded.model, each, blocks, rest)
        sizes = {k: (each[k].group, numbers) for k, numbers in groups.items()}
        rest = without_heads_of(sizes, rest)
        cut = {} if shared else _neurons(loaded.model, each, blocks, rest)
    removed = sum(p.numel() for k in blocks for p in calls[k].parameters())
    removed += sum(len(numbers) * _of_ffn(each[k]).each for k, numbers in cut.items())
    removed += sum(len(numbers) * _layers(each[k]).each for k, numbers in groups.items())
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


def _neurons(
    model: nn.Module, each: Sequence[BlockParameters], blocks: Sequence[int], terms: Sequence[TermId]
) -> dict[int, tuple[int, ...]]:
    """Neurons of every FFN that stays that leave the file, if the config can state it; one stays at least.

    each: by block call. blocks: those that go.
    """
    found, _ = shared_neurons(len(each), blocks, terms)
    layers = [one for k in found if (one := each[k].neurons) is not None]
    if not found or len(layers) < len(found):
        return {}
    if isinstance(or_reason(lambda: require_width(model, layers)), str):
        return {}
    return shared_neurons(len(each), blocks, terms, most=layers[0].count - 1)[0]


def _groups(
    model: nn.Module, each: Sequence[BlockParameters], blocks: Sequence[int], terms: Sequence[TermId]
) -> dict[int, tuple[int, ...]]:
    """Key and value heads of every attention that stays that leave with their heads, if the config can state it."""
    if not any(term.kind == "head" for term in terms):
        return {}
    stay = [k for k in range(len(each)) if k not in set(blocks) and len(each[k].each["head"])]
    layers = [each[k].heads for k in stay]
    proved = [one for one in layers if isinstance(one, HeadLayers)]
    if len(proved) < len(layers):
        return {}
    found = shared_groups({k: (one.heads, one.groups) for k, one in zip(stay, proved, strict=True)}, terms)
    if found and isinstance(or_reason(lambda: require_stated(model, proved)), str):
        return {}
    return found


def _of_ffn(block: BlockParameters) -> NeuronLayers:
    assert block.neurons is not None
    return block.neurons


def _layers(block: BlockParameters) -> HeadLayers:
    assert isinstance(block.heads, HeadLayers)
    return block.heads

"""A chosen set of terms as files that others can read: JSON with module names, and mergekit slices for whole blocks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.models.block.linears import applied_axis
from duat_cli.models.discovery.modality import is_pair
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.cutting import is_stated
from duat_cli.models.edits.surgery import without_blocks
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.terms.sites import Sites, TermId
from duat_cli.results.base import ModelFacts
from duat_cli.results.prune.chosen import ChosenSet, ChosenTerm


def chosen_set(
    model: nn.Module,
    structure: ModelStructure,
    sites: Sites,
    terms: Sequence[TermId],
    facts: ModelFacts,
    weights: Weights | None = None,
) -> ChosenSet:
    """The set with the names that the modules have in `model`, in a fixed order and each term once.

    weights: those of a model that is read block by block; None otherwise.
    """
    names = {module: path for path, module in model.named_modules()}
    ordered = sorted(set(terms), key=lambda t: (t.block, t.kind, -1 if t.index is None else t.index))
    return ChosenSet(
        model=facts.name,
        revision=facts.revision,
        fingerprint=facts.fingerprint,
        blocks=len(structure.calls),
        terms=tuple(_chosen(structure, sites, names, term, weights) for term in ordered),
    )


def _chosen(
    structure: ModelStructure, sites: Sites, names: Mapping[nn.Module, str], term: TermId, weights: Weights | None
) -> ChosenTerm:
    block = structure.calls[term.block]
    if term.kind == "block":
        return ChosenTerm(kind="block", block=term.block, index=None, module=names[block], place="whole", features=None)
    site, number = sites[block].find(term)
    features = None
    if site.place == "input":
        if weights is not None:
            weights.bring(block)
        weight = site.module.weight
        assert isinstance(weight, Tensor)
        width = weight.shape[applied_axis(site.module)] // site.count
        features = (number * width, (number + 1) * width)
    elif site.place == "routing":
        features = (number, number + 1)
    return ChosenTerm(
        kind=term.kind, block=term.block, index=term.index, module=names[site.module], place=site.place,
        features=features,
    )  # fmt: skip


def kinds_of_blocks(model: Any, structure: ModelStructure, removed: Sequence[int]) -> int:
    """How many kinds of blocks there are; the config tells them apart by number. Raises InputError where slices cannot
    say which blocks go, or where the config without them would build blocks of other kinds."""
    if is_pair(model):
        raise InputError(
            "--export: mergekit slices do not tell an encoder's blocks from a decoder's; give a .json file"
        )
    if len(set(structure.calls)) < len(structure.calls):
        raise InputError("--export: blocks that are one module cannot be sliced apart; give a .json file")
    stated = getattr(model.config.get_text_config(), "layer_types", None) or [None]
    kinds = max(len(set(stated)), len({type(block) for block in structure.calls}))
    if kinds > 1:
        with contextlib.suppress(UnsupportedModelError), without_blocks(model, structure, removed):
            if not is_stated(model):
                raise InputError(
                    f"--export: the config of {type(model).__name__} makes blocks of a kind by their number, so that "
                    "slices without these are no such model; give a .json file, or --apply"
                )
    return kinds


def mergekit_slices(blocks: int, removed: Sequence[int], *, model: str, dtype: str, kinds: int = 1) -> str:
    """A mergekit configuration that passes the other blocks through, with one slice per run of blocks that stay.

    `layer_range` is half-open, [first, past the last). blocks: how many there are; removed: which go; kinds: as
    `kinds_of_blocks` returns it.
    """
    import yaml  # of this form alone

    gone = set(removed)
    if bad := [b for b in gone if not 0 <= b < blocks]:
        raise InputError(f"block {bad[0]}: the model has blocks 0 to {blocks - 1}")
    keep = [b for b in range(blocks) if b not in gone]
    if not keep:
        raise InputError("no block would be left")
    starts = [b for b in keep if b - 1 not in keep]
    ends = [b + 1 for b in keep if b + 1 not in keep]
    kept = [{"model": model, "layer_range": [start, end]} for start, end in zip(starts, ends, strict=True)]
    content = {"slices": [{"sources": [one]} for one in kept], "merge_method": "passthrough", "dtype": dtype}
    note = "# the config lists kinds of blocks by their number: take the same numbers out of that list\n"
    text: str = yaml.safe_dump(content, default_flow_style=None, sort_keys=False, width=math.inf)
    return (note if kinds > 1 else "") + text

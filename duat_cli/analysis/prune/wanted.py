"""Which kinds of terms a model has, and which of their terms are ablated by themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.plan.task import PruneOptions, ablated
from duat_cli.analysis.prune.terms.responses import SEED, TermList
from duat_cli.errors import InputError
from duat_cli.grouping import by_key
from duat_cli.kinds import KINDS, NAMES, Kind, names_of
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.terms.sites import Sites
from duat_cli.results.base import Skipped
from duat_cli.statistics.survey import chances, draw
from duat_cli.text import indices

NOT_ABLATED = "not in the sample that was ablated; a larger --measure takes more"


def kinds_of(
    structure: ModelStructure, sites: Sites, options: PruneOptions, skipped: list[Skipped]
) -> tuple[Kind, ...]:
    """The kinds that are asked for and that the model has; those it lacks go into `skipped`. Raises InputError where
    none is left, or where experts are asked for with --ablate mean."""
    kept: list[Kind] = []
    for kind in options.kinds:
        if any(sites[module].count(kind) for module in structure.calls):
            kept.append(kind)
        known = (sites[module].reasons.get(kind) for module in structure.calls)
        reasons = by_key((why, number) for number, why in enumerate(known) if why is not None)
        if kind != "expert" or kind in kept:  # a dense model has no experts; that needs no mention
            skipped += [Skipped(what=f"{NAMES[kind]} of {indices('block', k)}", why=why) for why, k in reasons.items()]
    if not kept:
        there = ", ".join(kind for kind in KINDS if any(sites[module].count(kind) for module in structure.calls))
        why = "; ".join(f"{one.what}: {one.why}" for one in skipped)
        apart = f" that could be told apart ({why})" if why else ""
        raise InputError(f"--granularity {','.join(options.kinds)}: the model has no such terms{apart}; it has {there}")
    if options.ablate_mean and "expert" in kept:
        raise InputError("--ablate mean: an expert has no mean that could stand in for it; leave out expert")
    return tuple(kept)


def numbered(structure: ModelStructure, sites: Sites) -> list[str]:
    """The note on the numbers of a decoder's terms; empty for a model without cross-attention."""
    for block in structure.blocks:
        crossing = [site for site in sites[block.parts.module].sites if block.parts.in_cross(site.module)]
        if crossing:
            named = [indices(site.kind, list(range(site.offset, site.offset + site.count))) for site in crossing]
            return [f"cross-attention is numbered behind a block's own attention: {' and '.join(named)}"]
    return []


def require_set(named: int | None, terms: int, granularity: str) -> None:
    """Raises InputError where `named` of `terms` terms cannot be removed; None is always allowed."""
    if named is None:
        return
    most = terms - (granularity == "block")
    if not most:
        raise InputError(f"--set {named}: the only block cannot go")
    if not 1 <= named <= most:
        raise InputError(f"--set {named}: expected 1 to {most}, of {terms} {names_of(granularity)}")


@dataclass(frozen=True)
class Sample:
    """Terms of one kind that are ablated for real."""

    places: list[int]
    """Places in the term list, rising."""
    chance: list[float]
    """Chance of each to be in the sample, above 0 and at most 1."""


def sample_of(terms: TermList, kind: Kind, measure: int, prediction: Tensor) -> Sample:
    """All terms of a kind, or a random sample, in which chances grow with predicted damage.

    prediction: damage of every term in the list, made before any is ablated. It decides only which terms are drawn.
    """
    here = terms.places(kind)
    chance = chances(prediction[here.start : here.stop], ablated(kind, len(here), measure))
    drawn = draw(chance, torch.Generator().manual_seed(SEED))
    return Sample([here[k] for k in drawn], chance[drawn].tolist())

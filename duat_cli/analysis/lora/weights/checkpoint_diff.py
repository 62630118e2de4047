"""`duat lora-diff BASE TUNED`: the difference of two checkpoints, tensor by tensor, and the rank that it really has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import ne

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.lora.weights.adapter_diff import NOT_READ, Collected
from duat_cli.analysis.lora.weights.change import Change, common_rows, replaced
from duat_cli.analysis.lora.weights.kinds import kinds_of
from duat_cli.analysis.lora.weights.notable import numbered_anew, summarise
from duat_cli.analysis.lora.weights.weight_change import Directions, rounding
from duat_cli.analysis.progress import Progress
from duat_cli.checks.rules.declared import config_changes, told
from duat_cli.errors import CheckpointError
from duat_cli.grouping import by_key
from duat_cli.loading.adapter.base_weights import EMBEDDINGS, HEADS, BaseWeights, Place
from duat_cli.loading.adapter.origins import Origin, Renumbered, renumbered_stacks
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.declared.facts import Declared
from duat_cli.loading.declared.fields import flat
from duat_cli.operators.lowrank import nonfinite
from duat_cli.results.base import Run, Skipped
from duat_cli.results.lora import BlockOrigin, LoraReport
from duat_cli.text import listed, natural, plural, shown

Pairs = dict[str, tuple[Place, Place]]


def checkpoint_report(
    base: BaseWeights, tuned: BaseWeights, directions: Directions, progress: Progress, run: Callable[[], Run]
) -> LoraReport:
    """The report on a fully tuned checkpoint. Tensors are matched by name, with or without the head's prefix. In stacks
    with another number of blocks, each block is matched with the block of the base that it came from."""
    collected = Collected(directions)
    with base, tuned:
        renumbered = renumbered_stacks(base, tuned)
        pairs, reshaped = _pairs(base, tuned, renumbered)
        for number, name in enumerate(sorted(pairs, key=natural), 1):
            _compare(base, tuned, name, *pairs[name], collected)
            progress(number, len(pairs), "comparing the checkpoints")
    both = [*pairs.values(), *reshaped.values()]
    added = sorted(set(tuned.files.tensors) - {new.tensor for _, new in both})
    removed = sorted(set(base.files.tensors) - {old.tensor for old, _ in both})
    kinds = kinds_of(collected.modules)
    summary = summarise(collected.modules, kinds, collected.energy, collected.base_energy, None)
    notes = [*collected.notes, *_config_notes(base, tuned)]
    return LoraReport(
        duat_version=__version__,
        mode="checkpoint",
        level="weights",
        base=base.source.name,
        tuned=tuned.source.name,
        base_quantised=base.files.quantised,
        tuned_quantised=tuned.files.quantised,
        method="full",
        dtype=base.dtype(),
        modules=collected.modules,
        kinds=kinds,
        unchanged=collected.unchanged,
        reshaped=list(reshaped),
        added=added,
        removed=removed,
        matched=[_origin(one) for stack in renumbered for one in stack.blocks] or None,
        summary=summary.model_copy(update={"notable": [*map(numbered_anew, renumbered), *summary.notable]}),
        lint=[],
        skipped=[*collected.skipped, *_grouped(reshaped)],
        warnings=[*base.files.warnings, *tuned.files.warnings, *collected.warnings, *notes],
        run=run(),
    )


def _origin(one: Origin) -> BlockOrigin:
    return BlockOrigin(block=one.block.name, base=None if one.base is None else one.base.name, cosine=one.cosine)


def _grouped(reshaped: Pairs) -> Iterator[Skipped]:
    """One entry for each group of tensors whose shapes changed alike."""
    names = by_key(((old.shape, new.shape), name) for name, (old, new) in reshaped.items())
    for (old_shape, shape), alike in names.items():
        yield Skipped(what=listed(alike), why=f"{list(shape)} where the base has {list(old_shape)}: not compared")


def _pairs(base: BaseWeights, tuned: BaseWeights, renumbered: Sequence[Renumbered]) -> tuple[Pairs, Pairs]:
    """Places of tensors that can be subtracted, and of those that differ in the length of one axis; by the base's
    names, in renumbered stacks by those of the tuned checkpoint. Raises CheckpointError where the models differ."""
    pairs, reshaped = Pairs(), Pairs()
    for name, before, after in [*_names(base, renumbered), *_untied(base, tuned)]:
        old, new = base.find(before, load=False), tuned.find(after, load=False)
        if old is None or new is None:
            continue
        if old.shape == new.shape or (base.is_vocabulary(old) and old.shape[1:] == new.shape[1:]):
            pairs[name] = (old, new)
        elif len(old.shape) == len(new.shape) and sum(map(ne, old.shape, new.shape)) == 1:
            reshaped[name] = (old, new)
        else:
            raise CheckpointError(
                f"{shown(tuned.source.name)}: {shown(name)}: shape mismatch, {list(new.shape)} against the base's "
                f"{list(old.shape)}: it is not of this base model"
            )
    sizes = [len(one.files.tensors) for one in (base, tuned)]
    if 2 * len(pairs) < (min(sizes) if renumbered else sizes[0]):
        raise CheckpointError(
            f"{shown(tuned.source.name)}: only {len(pairs)} of the base's {sizes[0]} tensors are in it, in their "
            f"shapes; {shown(base.source.name)} is not its base model"
        )
    return pairs, reshaped


def _names(base: BaseWeights, renumbered: Sequence[Renumbered]) -> Iterator[tuple[str, str, str]]:
    """Names of each tensor: in the report, in the base and in the tuned checkpoint."""
    moved = {name for stack in renumbered for block in stack.base for name in block.tensors}
    yield from ((name, name, name) for name in base.files.tensors if name not in moved)
    for one in (one for stack in renumbered for one in stack.blocks):
        if one.base is not None:
            rests = [name.removeprefix(one.block.name) for name in one.block.tensors]
            yield from ((one.block.name + rest, one.base.name + rest, one.block.name + rest) for rest in rests)


def _untied(base: BaseWeights, tuned: BaseWeights) -> Iterator[tuple[str, str, str]]:
    """Names of the head where one checkpoint has its own and the other's is its embedding; otherwise nothing."""
    if base.files.config.get("architectures") != tuned.files.config.get("architectures"):
        return
    for own, other in ((base, tuned), (tuned, base)):
        heads, tables = own.weights_of(HEADS), other.weights_of(EMBEDDINGS)
        if other.ties_head and not other.weights_of(HEADS) and len(heads) == len(tables) == 1:
            yield (heads[0], heads[0], tables[0]) if own is base else (heads[0], tables[0], heads[0])


def _config_notes(base: BaseWeights, tuned: BaseWeights) -> list[str]:
    """A note on fields of config.json that both state with other values: these alone can change the forward pass."""
    before, after = (Declared(flat(one.files.config), {}) for one in (base, tuned))
    found = config_changes(before.entries(), after)
    changes = [change for change in found if not change[0].startswith("quantization_config")]
    return [f"config.json differs: {told(changes)}"] if changes else []


def _compare(base: BaseWeights, tuned: BaseWeights, name: str, old: Place, new: Place, into: Collected) -> None:
    before, after = base.read(old), tuned.read(new)
    if not (before.is_floating_point() and after.is_floating_point()):
        if not torch.equal(before, after):
            into.warnings.append(f"{name}: integers that differ; not a weight")
        return
    if before.shape == after.shape and before.dtype == after.dtype and torch.equal(before, after):
        into.unchanged.append(name)
        return
    plan = _plan(base, name, old, before)
    bad = nonfinite(before) + nonfinite(after)
    if bad:
        into.add(Change(plan, (), fault=f"{plural(bad, 'value')} NaN or infinite", nonfinite=bad), None, NOT_READ)
        into.modules[-1].reasons["rounding"] = into.modules[-1].reasons["spectral_norm"]
        return
    change, (second, first) = replaced(plan, after, before), common_rows(after, before)
    numbers = into.add(change, first, NOT_READ)
    if numbers is not None:
        entry = into.modules[-1]
        found = rounding(first, second, change.dense(), numbers) if second.ndim == 2 else None
        why = entry.reasons.get("spectral_norm", "estimated for a single matrix alone")
        reasons = entry.reasons if found is not None else {**entry.reasons, "rounding": why}
        into.modules[-1] = entry.model_copy(update={"rounding": found, "reasons": reasons})


def _plan(base: BaseWeights, name: str, place: Place, before: Tensor) -> ParameterPlan:
    module = name.rpartition(".")[0]
    turned = before.ndim == 2 and base.inputs_first(place.tensor)
    stack = before.shape[0] if before.ndim == 3 else 1
    return ParameterPlan(module or name, name, "full", {}, inputs_first=turned, experts=stack, place=place)

"""`duat lora-diff BASE TUNED`: the difference of two checkpoints, tensor by tensor, and how low-rank it really is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.lora.adapter_diff import NOT_READ, Collected
from duat_cli.analysis.lora.change import Change, common_rows, replaced
from duat_cli.analysis.lora.notable import summarise
from duat_cli.analysis.lora.weight_change import Directions, rounding
from duat_cli.analysis.progress import Progress
from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import BaseWeights, Place
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.wording import listed, shown
from duat_cli.operators.lowrank import nonfinite
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport
from duat_cli.text import plural


def checkpoint_report(
    base: BaseWeights, tuned: BaseWeights, directions: Directions, progress: Progress, run: Callable[[], Run]
) -> LoraReport:
    """The report on a fully tuned checkpoint; tensors are matched by name, with or without the head's prefix."""
    pairs = _pairs(base, tuned)
    collected = Collected(directions)
    with base, tuned:
        for number, (name, (old, new)) in enumerate(pairs.items(), 1):
            _compare(base, tuned, name, old, new, collected)
            progress(number, len(pairs), "comparing the checkpoints")
    added = sorted(set(tuned.files.tensors) - {new.tensor for _, new in pairs.values()})
    removed = sorted(set(base.files.tensors) - {old.tensor for old, _ in pairs.values()})
    resized = [m.whole_name for m in collected.modules if m.added_rows]
    notes = [f"resized: {listed(resized)}; only the common rows are compared"] if resized else []
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
        unchanged=collected.unchanged,
        added=added,
        removed=removed,
        summary=summarise(collected.modules, collected.energy, collected.base_energy, None),
        lint=[],
        skipped=collected.skipped,
        warnings=[*base.files.warnings, *tuned.files.warnings, *collected.warnings, *notes],
        run=run(),
    )


def _pairs(base: BaseWeights, tuned: BaseWeights) -> dict[str, tuple[Place, Place]]:
    pairs = {}
    for name in base.files.tensors:
        old, new = base.find(name, load=False), tuned.find(name, load=False)
        if old is not None and new is not None:
            pairs[name] = (old, new)
    if 2 * len(pairs) < len(base.files.tensors):
        raise CheckpointError(
            f"{shown(tuned.source.name)}: only {len(pairs)} of the base's {len(base.files.tensors)} tensors are in it; "
            f"{shown(base.source.name)} is not its base model"
        )
    for name, (old, new) in pairs.items():
        if old.shape != new.shape and not (base.is_vocabulary(old) and old.shape[1:] == new.shape[1:]):
            raise CheckpointError(
                f"{shown(tuned.source.name)}: {shown(name)}: shape mismatch, {list(new.shape)} against the base's "
                f"{list(old.shape)}: it is not of this base model"
            )
    return pairs


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
        return
    change, (second, first) = replaced(plan, after, before), common_rows(after, before)
    numbers = into.add(change, first, NOT_READ)
    if numbers is not None and second.ndim == 2:
        entry = into.modules.pop()
        found = rounding(first, second, change.dense(), numbers)
        into.modules.append(entry.model_copy(update={"rounding": found}))


def _plan(base: BaseWeights, name: str, place: Place, before: Tensor) -> ParameterPlan:
    module = name.rpartition(".")[0]
    turned = bool(base.is_transposed(name)) or "embed" in module or module.endswith("wte")
    stack = before.shape[0] if before.ndim == 3 else 1
    return ParameterPlan(
        module or name, name, "full", {}, inputs_first=turned and before.ndim == 2, experts=stack, place=place
    )

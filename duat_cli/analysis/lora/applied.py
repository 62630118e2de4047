"""The tuned model: a loaded base with an adapter's changes added to its weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from duat_cli.analysis.lora.change import Change, Read, adapter_tensors, change_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.adapter.parameter import AdapterFault, ParameterPlan
from duat_cli.loading.adapter.plan import plans
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.models.edits.tuned import TunedPages, Value, tuned_copy


def refuse_other_base(adapter: AdapterFiles, known: Iterable[ParameterPlan]) -> None:
    """UnsupportedModelError where the tuned model is not this base with some weights changed."""
    if adapter.config.get("layer_replication"):
        raise UnsupportedModelError(
            f"{adapter.name}: layer_replication makes another model than its base; without prompts its weights are "
            "compared all the same"
        )
    mutated = next((plan.other_base for plan in known if plan.other_base), None)
    if mutated is not None:
        raise UnsupportedModelError(
            f"{adapter.name}: init_lora_weights {mutated}: its base was mutated by {mutated}, so the "
            "tuned model cannot be rebuilt from this one"
        )


def refuse_resized(adapter: str, parameter: str, rows: int, added: int) -> NoReturn:
    """UnsupportedModelError: a parameter has another number of rows than the base's, which the base cannot run with."""
    raise UnsupportedModelError(
        f"{adapter}: {parameter} has {rows + added} rows, the base's {rows}: the tuned model cannot be run from this "
        "base; merge it with PEFT and compare the merged checkpoint: duat lora-diff BASE MERGED --prompts FILE"
    )


def by_parameter(known: Iterable[ParameterPlan]) -> dict[str, list[ParameterPlan]]:
    """Parameter -> every plan that changes it."""
    found: dict[str, list[ParameterPlan]] = {}
    for plan in known:
        found.setdefault(plan.parameter, []).append(plan)
    return found


def whole(planned: Sequence[ParameterPlan], read: Read, base: BaseWeights) -> Tensor:
    """Everything that these plans add to their one parameter, in its shape; UnsupportedModelError where a change is not
    defined."""

    def dense(plan: ParameterPlan) -> Tensor:
        change = change_of(plan, read, base)
        _refuse_undefined(plan.parameter, change)
        return change.dense()

    first, *others = (dense(plan) for plan in planned)
    for other in others:
        first = first + other
    return first


def tied_changes(known: Iterable[ParameterPlan]) -> frozenset[str]:
    """Parameters whose change acts wherever their tensor is used."""
    return frozenset(plan.parameter for plan in known if plan.kind == "trainable tokens")


def tuned_model(base: LoadedModel, changes: Mapping[str, Value], tied: frozenset[str]) -> LoadedModel:
    """The base with the changes, its weights read block by block where the base's are."""
    if base.paged is None:
        return replace(base, model=tuned_copy(base.model, changes, tied=tied))
    place = Source(base.files.path, base.name, base.revision)
    edit = TunedPages(changes, tied)
    other = load_files(place, base.files, dtype=base.dtype, device=base.device, paged=True, edit=edit)
    return replace(base, model=other.model, paged=other.paged)


@contextlib.contextmanager
def adapted(loaded: LoadedModel, adapter: AdapterFiles, base: BaseWeights) -> Iterator[LoadedModel]:
    """The loaded base with the whole adapter applied, while the adapter's tensors are open.

    UnsupportedModelError names the first change that is not defined, or that makes another model than this base.
    """
    with base, adapter_tensors(adapter) as read:
        found = list(plans(adapter, read_keys(adapter), base))
        known = [plan for plan in found if isinstance(plan, ParameterPlan)]
        for fault in found:
            if isinstance(fault, AdapterFault):
                raise UnsupportedModelError(str(fault)) from fault
        refuse_other_base(adapter, known)
        changes: dict[str, Callable[[], Tensor]] = {}
        for name, planned in by_parameter(known).items():
            parts = [change_of(plan, read, base) for plan in planned]
            for change in parts:
                _refuse_undefined(name, change)
                if change.added_rows and change.plan.place is not None:
                    refuse_resized(adapter.name, name, change.plan.place.shape[0], change.added_rows)
            if not all(change.is_zero for change in parts):
                changes[name] = functools.partial(whole, planned, read, base)
            del parts
        yield tuned_model(loaded, changes, tied_changes(known))


def _refuse_undefined(name: str, change: Change) -> None:
    if change.fault:
        raise UnsupportedModelError(f"the change of {name} is not defined: {change.fault}")

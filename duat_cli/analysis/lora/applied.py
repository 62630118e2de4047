"""The tuned model: a loaded base with an adapter's changes added to its weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from duat_cli.analysis.lora.weights.change import Change, Opened, Read, change_of, opened
from duat_cli.analysis.stacks import chosen_stack, of_decoder
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.models.edits.tuned import TunedPages, own_names, tuned_copy


def refuse_other_base(adapter: AdapterFiles, known: Iterable[ParameterPlan]) -> None:
    """Raises UnsupportedModelError where the tuned model is not this base with some weights changed."""
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
    """Raises UnsupportedModelError for a parameter whose number of rows differs from the base's: the base cannot run
    with it."""
    raise UnsupportedModelError(
        f"{adapter}: {parameter} has {rows + added} rows, the base's {rows}: the tuned model cannot be run from this "
        "base; merge it with PEFT and compare the merged checkpoint: duat lora-diff BASE MERGED --prompts FILE"
    )


def whole(planned: Sequence[ParameterPlan], read: Read, base: BaseWeights) -> Tensor:
    """Sum of all that these plans add to the one parameter that they change, in its shape. Raises UnsupportedModelError
    where a change is not defined."""

    def dense(plan: ParameterPlan) -> Tensor:
        change = change_of(plan, read, base)
        _refuse_undefined(plan.parameter, change)
        return change.dense()

    first, *others = (dense(plan) for plan in planned)
    for other in others:
        first = first + other
    return first


def tuned_model(loaded: LoadedModel, one: Opened, base: BaseWeights, changed: Iterable[str]) -> LoadedModel:
    """The loaded base with these parameters changed. Where the base's weights are read block by block, so are those of
    the tuned model. Each change is computed when it is applied."""
    planned = one.by_parameter
    changes = {name: functools.partial(whole, planned[name], one.read, base) for name in changed}
    tied = _tied_tokens(loaded.named, [plan.parameter for plan in one.plans if plan.kind == "trainable tokens"])
    if loaded.paged is None:
        return _with_model(loaded, tuned_copy(loaded.named, changes, tied=tied))
    place, edit = Source(loaded.files.path, loaded.name, loaded.revision), TunedPages(changes, tied)
    other = load_files(place, loaded.files, dtype=loaded.dtype, device=loaded.device, paged=True, edit=edit)
    return replace(_with_model(loaded, other.model), paged=other.paged)


def _tied_tokens(model: Any, tables: list[str]) -> frozenset[str]:
    """The tables whose trainable tokens change wherever the table is used. As PEFT has it, this is the input embedding,
    unless a layer that shares its weight has tokens of its own. tables: all that have trainable tokens."""
    if not tables:
        return frozenset()
    held = {name: model.get_submodule(module) for name, (module, _) in own_names(model, tables).items()}
    embedding = model.get_input_embeddings()
    sharing = [name for name, holder in held.items() if holder.weight is embedding.weight]
    return frozenset(sharing if len(sharing) == 1 and held[sharing[0]] is embedding else ())


def _with_model(loaded: LoadedModel, model: Any) -> LoadedModel:
    """`loaded` with `model` in place of its model; where it holds a part of a model, with the same part of `model`."""
    if loaded.pair is not None:
        return of_decoder(loaded, model)
    if loaded.whole is None:
        return replace(loaded, model=model)
    return replace(loaded, model=chosen_stack(model, loaded.stack), whole=model)


@contextlib.contextmanager
def adapted(loaded: LoadedModel, adapter: AdapterFiles, base: BaseWeights) -> Iterator[LoadedModel]:
    """The loaded base with the whole adapter applied, as a context in which the base's tensors can be read.

    Raises UnsupportedModelError, which names the first change that is not defined or that does not fit this base.
    """
    with base:
        one = opened(adapter, base)
        for fault in one.faults:
            raise UnsupportedModelError(str(fault)) from fault
        refuse_other_base(adapter, one.plans)
        changed: list[str] = []
        for name, planned in one.by_parameter.items():
            parts = [change_of(plan, one.read, base) for plan in planned]
            for change in parts:
                _refuse_undefined(name, change)
                if change.added_rows and change.plan.place is not None:
                    refuse_resized(adapter.name, name, change.plan.place.shape[0], change.added_rows)
            if not all(change.is_zero for change in parts):
                changed.append(name)
            del parts
        yield tuned_model(loaded, one, base, changed)


def _refuse_undefined(name: str, change: Change) -> None:
    if change.fault:
        raise UnsupportedModelError(f"the change of {name} is not defined: {change.fault}")

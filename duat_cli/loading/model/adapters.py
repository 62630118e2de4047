"""The base of a PEFT model in memory, changed as its adapters change it now, layer by layer.

One layer may be disabled or merged already while others are not. The weight that an adapter changes may be another
layer's as well (tied embeddings); the running model leaves that other layer as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duat_cli.compat.torch import add_hooks, children_of, is_hooked, parameters_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.quiet import foreign_errors
from duat_cli.text import clean, listed, plural

Copies = dict[int, tuple[nn.Parameter, nn.Parameter]]  # id of a copy -> the copy, and the weight it was copied from

_NONE = "no adapter is active: these are the numbers of the base"


def rest(shell: nn.Module) -> None:
    """Unmerges the adapters of layers that are disabled, as PEFT does when they run next. No weight that the caller may
    hold is written to, and tied weights stay tied."""
    parts: list[Any] = [part for part in shell.modules() if _is_tuner(part) and _is_off(part)]
    for part in parts:
        if part.merged:
            for parameter in part.base_layer.parameters():
                parameter.data = parameter.data.clone()
            with foreign_errors("an adapter is merged and disabled: PEFT cannot unmerge it", UnsupportedModelError):
                part.unmerge()


def merged(shell: Any) -> tuple[PreTrainedModel, list[str]]:
    """The base with the active adapters merged, and notes for the user.

    shell: a copy of a PEFT model at rest, which is used up. Its weights may be the caller's; none is written to.
    UnsupportedModelError where PEFT cannot merge the adapter, where an adapter puts vectors in front of the tokens
    (these are no weights), and where a hook of the caller's has no place without the adapter.
    """
    if shell.active_peft_config.is_prompt_learning:
        kind = clean(str(shell.active_peft_config.peft_type.value))
        raise UnsupportedModelError(f"{kind}: puts vectors in front of the tokens and changes no weights; not read yet")
    base = shell.get_base_model()
    if is_hooked(shell.base_model):  # not all PEFT models run it
        raise UnsupportedModelError(
            f"{type(shell.base_model).__name__}: a forward hook on it has no place once its adapters are merged; "
            f"register it on the {type(shell).__name__} or on get_base_model()"
        )
    active = sorted(clean(name) for name in shell.active_adapters)
    with foreign_errors(f"adapter {listed(active)}: PEFT cannot merge it", UnsupportedModelError):
        layers = dict(_wrapped(base))
        off = [name for name, layer in layers.items() if _is_off(layer)]
        used = {adapter for layer in layers.values() if not _is_off(layer) for adapter in _in_use(layer)}
        for part in [m for layer in layers.values() for m in layer.modules() if _is_tuner(m) or _is_saved(m)]:
            if _is_off(part) or (_is_tuner(part) and part.merged):
                part.set_adapter([])  # the wrapped layer alone runs
        copies: Copies = {}
        for name, layer in layers.items():
            acts = any(part.active_adapters for part in layer.modules() if _is_tuner(part))
            _refuse_hooks_inside(name, layer, acts)
            if acts:
                copies |= {id(new): (new, old) for part in _outermost(layer) for new, old in _copied(part)}
        tied = getattr(base.config, "tie_word_embeddings", None)
        model = shell.merge_and_unload(progressbar=False) if copies else shell.unload()
        for name, layer in layers.items():
            add_hooks(layer, model.get_submodule(name))
        add_hooks(shell, model)  # the shell passes its inputs and outputs on unchanged
    apart = _tied_again(model, copies)
    if copies and tied is not None:  # PEFT unsets it, also for weights that are tied again here
        model.config.tie_word_embeddings = False if apart else tied
    if off and len(off) == len(layers):
        notes = [f"{_are(active)} disabled: these are the numbers of {'their' if len(active) > 1 else 'its'} base"]
    else:
        names = [clean(name) for name in sorted(used)]
        where = f", but disabled in {len(off)} of {plural(len(layers), 'layer')}" if off else ""
        notes = [f"{_are(names)} merged into the base{where}" if names else _NONE]
    if apart:
        notes.append(
            f"{listed(apart)} were one weight, which the adapters do not change alike: here they are apart, as the "
            "model runs; a merged checkpoint that keeps the tie gives other numbers"
        )
    return model, notes


def _are(names: list[str]) -> str:
    return f"the adapters {listed(names)} are" if len(names) > 1 else f"the adapter {listed(names)} is"


def _is_tuner(module: Any) -> bool:
    """Whether the module wraps a layer and changes what the layer computes."""
    return children_of(module).get("base_layer") is not None and hasattr(module, "merged_adapters")


def _is_saved(module: Any) -> bool:
    """Whether the module wraps a layer that adapters store a whole copy of, or some tokens of."""
    return "original_module" in children_of(module) and hasattr(module, "unload_and_optionally_merge_module")


def _is_off(module: Any) -> bool:
    return getattr(module, "disable_adapters", None) is True  # of transformers' models it is a method


def _in_use(layer: Any) -> list[str]:
    """Names of the adapters that a layer runs with: the merged ones if there are any, otherwise the active ones."""
    return (layer.merged_adapters if _is_tuner(layer) else []) or layer.active_adapters


def _wrapped(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers of layers, each with its name; without wrappers inside of other wrappers."""
    for leaf, child in module.named_children():
        if _is_tuner(child) or _is_saved(child):
            yield prefix + leaf, child
        else:
            yield from _wrapped(child, f"{prefix}{leaf}.")


def _outermost(layer: nn.Module) -> list[Any]:
    if _is_tuner(layer):
        return [layer]
    return [part for child in layer.children() for part in _outermost(child)]


def _copied(part: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Gives the layer weights of its own, so that merging changes them there alone. Returns each new weight with the
    old one."""
    old = list(part.base_layer.parameters())
    part.base_layer = copy.deepcopy(part.base_layer)
    return list(zip(part.base_layer.parameters(), old, strict=True))


def _tied_again(model: nn.Module, copies: Copies) -> list[str]:
    """Ties the weights again that were tied before and still have equal values; returns the names of those that now
    differ."""
    places: dict[int, dict[str, nn.Parameter]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        old = copies[id(value)][1] if id(value) in copies else value
        places.setdefault(id(old), {})[name] = value
    apart: list[str] = []
    for users in places.values():
        first, *others = users.values()
        if all(other is first for other in others):
            continue
        if not all(torch.equal(first, other) for other in others):
            apart += users
            continue
        for name in users:
            module, _, leaf = name.rpartition(".")
            parameters_of(model.get_submodule(module))[leaf] = first
    return apart


def _refuse_hooks_inside(name: str, layer: nn.Module, acts: bool) -> None:
    """Refuses a caller's hook inside a wrapped layer. acts: whether an adapter changes what the layer computes; if not,
    only the wrapped layer runs, and hooks on it are fine."""
    for part, module in layer.named_modules():
        if part and is_hooked(module) and (acts or _is_tuner(module)):
            raise UnsupportedModelError(
                f"{clean(name)}.{clean(part)}: a forward hook on it has no place once the adapter is merged; register "
                f"it on {clean(name)}"
            )

"""Whether a model's code obeys what config.json declares for single layers.

A class that does not know `per_layer_config` loads without an error and runs the whole layer; only a comparison of
models shows it. So the modules are built without memory, with and without the declaration. A declared size is ignored
if it changes no shape of its layer although it would as the size of all layers; likewise a declaration that would make
modules of another class. A skip may act in the forward pass only: for it, models with and without the declaration run
with the same weights on a short input.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers

from duat_cli.checks.places import block_of
from duat_cli.compat.torch import buffers_of
from duat_cli.loading.declared.per_layer import PER_LAYER, SKIP, Override
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.quiet import hushed
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.discovery.causality import probe_output

STREAMED = "its weights are read block by block, and a model without the skip would have to run beside it"
UNBUILT = "could not be built without memory"
Tree = dict[str, object]  # name of a tensor or module -> shape or class


def judged(loaded: LoadedModel, declared: Sequence[Override]) -> tuple[Override, ...]:
    """The declared overrides, each marked as obeyed or ignored, or with the reason why it is not known.

    Declarations that show in no shape and no module, such as the window of attention, are left out, because a short
    input may not show them.
    """
    if not declared:
        return ()
    with hushed():
        return tuple(_judged(loaded, declared))


def _judged(loaded: LoadedModel, declared: Sequence[Override]) -> Iterable[Override]:
    model = loaded.model
    whole, plain = _tree(model, declared), _tree(model, [])
    if whole is None:
        yield from (replace(one, why=f"the modules {UNBUILT}") for one in declared)
        return
    without = {name: _tree(model, _but(declared, name)) for name in {one.field for one in declared}}
    for one in declared:
        other = without[one.field]
        if other is None or _part(whole, one.layer) != _part(other, one.layer):
            yield replace(one, ignored=False)  # its layer is built differently
        elif one.field == SKIP:
            yield _run(loaded, declared, one)
        elif plain is None:
            yield replace(one, why=f"the modules of a config without declarations {UNBUILT}")
        elif _tree(model, [], one) not in (None, plain):  # with that value for all layers
            yield replace(one, ignored=True, why=f"nothing in the layer is built otherwise ({_version()})")


def _but(declared: Sequence[Override], field: str, layer: int | None = None) -> list[Override]:
    """The declarations without a field, in one layer or in all."""
    return [one for one in declared if one.field != field or layer not in (None, one.layer)]


def _config(model: Any, declared: Iterable[Override]) -> Any:
    """The model's config with only these declarations."""
    config = copy.deepcopy(model.config)
    layers: dict[int, dict[str, Any]] = {}
    for one in declared:
        layers.setdefault(one.layer, {})[one.field] = one.value
    setattr(config.get_text_config(), PER_LAYER, layers or None)
    return config


def _built(model: Any, config: Any) -> Any:
    """The modules, built without memory; None where the class refuses the config."""
    try:
        with torch.device("meta"):
            return type(model)(config)
    except Exception:  # foreign code may raise anything on a config that it was not written for
        return None


def _tree(model: Any, declared: Iterable[Override], everywhere: Override | None = None) -> Tree | None:
    """Shapes and classes of the modules with these declarations; None where they cannot be built. everywhere: a value
    to set for all layers as well."""
    try:
        config = _config(model, declared)
        if everywhere is not None:
            setattr(config.get_text_config(), everywhere.field, everywhere.value)
    except Exception:  # transformers checks values when they are set
        return None
    built = _built(model, config)
    if built is None:
        return None
    found: Tree = {name: tuple(value.shape) for name, value in built.state_dict().items()}
    return found | {f"{name}.": type(module).__name__ for name, module in built.named_modules()}


def _part(tree: Tree, layer: int) -> Tree:
    """The part of a tree that is in layers of that number."""
    return {name: value for name, value in tree.items() if (place := block_of(name)) and place[0].index == layer}


def _run(loaded: LoadedModel, declared: Sequence[Override], one: Override) -> Override:
    """The skip, judged by running the model's own weights with and without it."""
    if loaded.paged is not None:
        return replace(one, why=STREAMED)
    if loaded.nonfinite_weights:
        return replace(one, why="weights that are not finite leave nothing to compare")
    try:
        twin = _twin(loaded.model, _config(loaded.model, _but(declared, SKIP, one.layer)))
        error = relative_error(probe_output(twin), probe_output(loaded.model))
    except Exception as fault:
        return replace(one, why=f"the model without it does not run: {type(fault).__name__}")
    same = error <= tolerance_for(loaded.model.dtype)
    return replace(one, ignored=same, why=f"the output is the same without it ({_version()})" if same else "")


def _twin(model: Any, config: Any) -> Any:
    """A model with that config that shares the tensors of `model`."""
    twin = _built(model, config)
    twin.load_state_dict(model.state_dict(), assign=True)
    for name, module in model.named_modules():
        buffers_of(twin.get_submodule(name)).update(buffers_of(module))
    return twin.eval()


def _version() -> str:
    return f"transformers {transformers.__version__}"

"""Models whose forward pass replaces modules of their own for good; they are read as they were loaded.

BigBird gives up its sparse attention with the first input that is too short for it, so that its output depends on the
inputs before. Once a pass has exchanged modules, another input is accepted only if the model as it was loaded would
exchange the same modules on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import children_of, is_list, operations_through, written
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.hooks import ExchangedError, hooked

Held = dict[str, Any]
"""Submodules and attributes of a module, by name."""

_as_loaded: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()
"""The submodules and attributes that passes replaced, as they were before, from `_exchange`."""

EXCHANGES = "its forward pass exchanges modules of its own"
NOT_FOLLOWED = "which cannot be followed where weights are read block by block; give it memory for all of them"


class _StoppedError(Exception):
    """Ends a pass in front of its first block, or in front of a module whose weights are not in memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def run_as_loaded(stack: Any, given: Mapping[str, Any]) -> Any:
    """The output of a stack, which is the one that it would give if it had run on nothing before."""
    _require_same_exchange(stack, given)
    before = _held(stack)
    output = stack(**given)
    changed = _exchange(stack, before)
    for module, held in changed.items():
        _as_loaded[module] = {**held, **_as_loaded.get(module, {})}
    if changed and any(map(_is_away, stack.modules())):  # passes that run side by side may see both models
        raise ExchangedError(f"{type(stack).__name__}: {EXCHANGES}, {NOT_FOLLOWED}")
    return output


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """The context around passes that `run_as_loaded` does not see: modules that they exchange are put back."""
    before = _held(model)
    try:
        yield
    finally:
        _put(_exchange(model, before))


def weights_kept(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The context around a pass that raises UnsupportedModelError before a write changes a weight: the weight may
    belong to a caller's model, or not be in memory."""
    weights = {p.untyped_storage(): name for name, p in model.named_parameters()}

    def run(operation: Any, args: Any, kwargs: Any) -> Any:
        for tensor in written(operation, args, kwargs):
            name = weights.get(tensor.untyped_storage())
            if name is not None and not _keeps(operation, args, kwargs):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its forward pass writes to a weight of its own ({name}), so that what it "
                    "gives depends on what it ran on before; its config may have a field that turns this off"
                )
        return operation(*args, **kwargs)

    return operations_through(run)


def _keeps(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that writes to its first argument leaves it as it was. False for other operations, of which
    this is not known."""
    found, others = written(operation, args, kwargs), [*args[1:], *kwargs.values()]
    if len(found) != 1 or found[0] is not args[0] or any(isinstance(one, Tensor) for one in others):
        return False
    before = torch.rand(args[0].shape).to(args[0].dtype) if args[0].is_meta else args[0]
    operation(after := before.clone(), *args[1:], **kwargs)
    return torch.equal(before, after)


def _require_same_exchange(stack: nn.Module, given: Mapping[str, Any]) -> None:
    """Runs the model as it was loaded up to its first block, if a pass has exchanged modules of it. Raises
    UnsupportedModelError if this input does not exchange the same ones."""
    if not _as_loaded:
        return
    loaded = {module: _as_loaded[module] for module in stack.modules() if module in _as_loaded}
    if not loaded:
        return
    now, at, first = _of_names(loaded), stack, _stops(stack, loaded)
    _put(loaded)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), hooked(first, _stop, first=True):
            stack(**given)
    except _StoppedError as stopped:
        at = stopped.module
    finally:
        reached = _of_names(loaded)
        _put(now)
    found = [
        (f"{name}.{own}".lstrip("."), type(reached[module][own]).__name__, type(there).__name__)
        for name, module in stack.named_modules()
        for own, there in now.get(module, {}).items()
        if isinstance(there, nn.Module) and type(reached[module][own]) is not type(there)
    ]
    if found and _is_away(at):
        raise UnsupportedModelError(f"{type(stack).__name__}: {EXCHANGES}, {NOT_FOLLOWED}")
    if found:
        name, kept, there = found[0]
        raise UnsupportedModelError(
            f"{type(stack).__name__}: on {_size(given)} it runs {kept} ({name}), and on what it ran on before {there}, "
            "which stays and is what duat reads: give inputs on which it runs that, of other lengths, perhaps "
            "(--max-tokens cuts prompts)"
        )


def _stops(stack: nn.Module, changed: Mapping[nn.Module, Held]) -> list[nn.Module]:
    """The modules at which a pass is stopped: elements of lists that hold changed modules, of which the first to be
    called is the first block; and modules without weights in memory, since other passes would go on while they are
    read."""
    elements = [one for found in stack.modules() if is_list(found) for one in found.children()]
    owners = {module for module, held in changed.items() if any(isinstance(one, nn.Module) for one in held.values())}
    return [*(one for one in elements if owners & set(one.modules())), *filter(_is_away, stack.modules())]


def _stop(module: nn.Module, _args: Any, _kwargs: Any) -> None:
    raise _StoppedError(module)


def _is_away(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters(recurse=False))


def _of_names(held: Mapping[nn.Module, Held]) -> dict[nn.Module, Held]:
    """The present values of the same submodules and attributes."""
    return {module: {name: getattr(module, name) for name in names} for module, names in held.items()}


def _held(stack: nn.Module) -> dict[nn.Module, Held]:
    """The submodules and attributes of every module."""
    return {module: {**vars(module), **children_of(module)} for module in stack.modules()}


def _exchange(stack: nn.Module, before: Mapping[nn.Module, Held]) -> dict[nn.Module, Held]:
    """The submodules and settings that passes replaced, as they were before; empty where no module was exchanged."""
    if before.keys() <= set(stack.modules()):
        return {}
    kinds = nn.Module | str | int | float | None
    after, changed = _held(stack), dict[nn.Module, Held]()
    for module in before.keys() & after.keys():
        there, held = after[module], before[module]
        if found := {n: v for n, v in held.items() if isinstance(v, kinds) and there.get(n) is not v}:
            changed[module] = found
    return changed


def _put(held: Mapping[nn.Module, Held]) -> None:
    for module, values in held.items():
        for name, value in values.items():
            setattr(module, name, value)


def _size(given: Mapping[str, Any]) -> str:
    """The input, with its length, as a text."""
    ids = given.get("input_ids")
    return f"an input of {ids.shape[-1]} tokens" if isinstance(ids, Tensor) else "this input"

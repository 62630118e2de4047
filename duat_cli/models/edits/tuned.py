"""A model with some parameters changed, beside the model it comes from; unchanged parameters are shared."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import buffers_of, parameters_of
from duat_cli.compat.transformers import load_part, targets_of
from duat_cli.errors import UnsupportedModelError

Value = Callable[[], Tensor]


def own_names(model: Any, names: list[str]) -> dict[str, tuple[str, str]]:
    """Parameter -> (module, leaf) in this model. Names may have the base model's prefix or lack it.

    A bias that a linear layer lacks is a place as well. A name of the files that the model does not have is replaced by
    the one that transformers gives it on loading. Raises UnsupportedModelError for a parameter without a place.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    renamed = functools.cache(lambda: targets_of(model, names))
    found = {}
    for name in names:
        for candidate in _candidates(name, prefix, renamed):
            module, _, leaf = candidate.rpartition(".")
            holder = modules.get(module)
            if holder is None:
                continue
            if leaf in parameters_of(holder) or leaf in buffers_of(holder):
                found[name] = (module, leaf)
                break
        else:
            raise UnsupportedModelError(
                f"{name} is no parameter of {type(model).__name__} as it is loaded, so the tuned model cannot be run; "
                "without prompts its weights are compared all the same"
            )
    return found


def joined_places(model: Any, names: list[str]) -> dict[str, tuple[str, str]]:
    """Tensor -> (module, leaf) of the joined parameter, for those tensors of the files that transformers joins with
    others on loading, such as the weights of single experts."""
    targets = {name: target for name, (target, changed) in targets_of(model, names).items() if changed}
    own = {name: target.rpartition(".") for name, target in targets.items() if name not in model.state_dict()}
    return {name: (module, leaf) for name, (module, _, leaf) in own.items()}


def _candidates(name: str, prefix: str, renamed: Callable[[], Mapping[str, tuple[str, bool]]]) -> Iterator[str]:
    yield from (name, prefix + name, name.removeprefix(prefix))
    target, changed = renamed().get(name, (name, True))
    if not changed:
        yield target


def tuned_copy(model: Any, changes: Mapping[str, Value], *, tied: frozenset[str] = frozenset()) -> Any:
    """The model with `changes` (parameter -> its difference) added in float64, then cast to its dtype.

    tied: parameters whose change applies wherever the same tensor is used; the others change only in their own module.
    """
    places = own_names(model, list(changes))
    memo: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    tuned = copy.deepcopy(model, memo)
    for name, change in changes.items():
        module, leaf = places[name]
        holder = tuned.get_submodule(module)
        old = getattr(holder, leaf)
        if isinstance(old, Tensor):
            new = (old.detach().double() + change().to(old.device)).to(old.dtype)
        else:
            new = change().to(device=tuned.device, dtype=tuned.dtype)
        users = _users(tuned, old) if name in tied and isinstance(old, Tensor) else [(holder, leaf)]
        parameter = nn.Parameter(new, requires_grad=False)
        for user, place in users:
            if place in buffers_of(user):
                buffers_of(user)[place] = new
            else:
                parameters_of(user)[place] = parameter
    return tuned


class TunedPages:
    """The changes for a model whose weights are read block by block: they are added to a page as it is read."""

    def __init__(self, changes: Mapping[str, Value], tied: frozenset[str]) -> None:
        self._changes, self._tied = changes, tied
        self._places: dict[str, tuple[str, str]] = {}

    def prepare(self, model: Any) -> None:
        """Finds the places of the changes, and adds parameters that the base lacks to the model.

        Raises UnsupportedModelError where a tensor is used in several places and changes in only one of them.
        """
        self._places = own_names(model, list(self._changes))
        for name, (module, leaf) in list(self._places.items()):
            holder = model.get_submodule(module)
            old = getattr(holder, leaf)
            if old is None:
                new = self._changes[name]().to(dtype=model.dtype)
                parameters_of(holder)[leaf] = nn.Parameter(new, requires_grad=False)
                del self._places[name]
            elif name not in self._tied and len(_users(model, old)) > 1:
                raise UnsupportedModelError(
                    f"{name}: the same tensor is used elsewhere, where it stays as it is; the tuned model cannot be "
                    "run with its weights read block by block: give more --memory"
                )

    def changes(self, parameter: str) -> bool:
        """Whether this parameter of the model is changed."""
        return parameter in {f"{module}.{leaf}" for module, leaf in self._places.values()}

    def put(self, model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
        """Loads tensors of the files into the model, with the changes added."""
        held = {name: (model.get_submodule(module), leaf) for name, (module, leaf) in self._places.items()}
        missing = [name for name, (holder, leaf) in held.items() if getattr(holder, leaf).is_meta]
        load_part(model, tensors, dtype, device)
        for name in missing:
            holder, leaf = held[name]
            old = getattr(holder, leaf)
            if not old.is_meta:
                new = (old.detach().double() + self._changes[name]().to(old.device)).to(old.dtype)
                setattr(holder, leaf, nn.Parameter(new, requires_grad=False) if leaf in parameters_of(holder) else new)


def _users(model: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    return [(m, leaf) for m in model.modules() for leaf, held in parameters_of(m).items() if held is tensor]

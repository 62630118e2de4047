"""A model with some parameters changed, beside the model it comes from: what does not change is shared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import buffers_of, parameters_of
from duat_cli.errors import UnsupportedModelError

Value = Callable[[], Tensor]


def own_names(model: Any, names: list[str]) -> dict[str, tuple[str, str]]:
    """Parameter -> (module, leaf) in this model, whose names may have the base model's prefix or lack it.

    A bias that a linear layer has not is a place as well. UnsupportedModelError names what has none.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name in names:
        for candidate in (name, prefix + name, name.removeprefix(prefix)):
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


def tuned_copy(model: Any, changes: Mapping[str, Value], *, tied: frozenset[str] = frozenset()) -> Any:
    """The model with `changes` (parameter -> its difference) added in float64, then cast to its dtype.

    tied: parameters whose change acts wherever the same tensor is used; the others change in their module alone.
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


def _users(model: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    return [(m, leaf) for m in model.modules() for leaf, held in parameters_of(m).items() if held is tensor]


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """(N, vocabulary) of one prompt (1, N), unbatched."""
    held: Tensor = model(input_ids=ids.to(model.device), attention_mask=torch.ones_like(ids).to(model.device)).logits[0]
    return held

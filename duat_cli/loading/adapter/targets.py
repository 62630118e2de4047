"""The modules that an adapter's config targets, by PEFT's rule (0.21), and those of them that the adapter has no
tensors of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.keys import Keys
from duat_cli.text import shown

_By = Callable[[str, str], "re.Match[str] | None"]


def targeted(config: dict[str, Any], module: str) -> bool:
    """Whether PEFT wraps a layer of that name; with 'all-linear', any layer. CheckpointError for an invalid pattern."""
    target, saved = config.get("target_modules"), _texts(config.get("modules_to_save"))
    if excluded(config, module) or any(_match(rf"(^|.*\.){s}($|\..*)", module) for s in saved):
        return False
    if isinstance(target, str):
        return target.lower() == "all-linear" or _named(target, module)
    whole = module in _texts(target)
    return whole or (_named(target, module) and _in_layers(config, module))


def excluded(config: dict[str, Any], module: str) -> bool:
    """Whether exclude_modules excludes a layer of that name. CheckpointError for an invalid pattern."""
    return _named(config.get("exclude_modules"), module)


def lost_modules(adapter: AdapterFiles, keys: Keys, base: BaseWeights) -> list[str]:
    """Modules of the base that are targeted and have no tensors in the adapter, although the module of the same name in
    another layer has. Without that condition, a list of targets may name modules elsewhere that PEFT could not wrap."""
    if adapter.config.get("layer_replication"):
        return []
    have: dict[str, str] = {}  # the base's name -> the adapter's
    for target in keys.targets:
        place = base.find(f"{target.module}.weight", load=False)
        if place is not None:
            have[place.tensor.removesuffix(".weight")] = target.module
    like = {_numberless(module): (module, key) for module, key in have.items()}
    found = []
    for name in base.files.tensors:
        module = name.removesuffix(".weight")
        sibling = like.get(_numberless(module))
        if module != name and module not in have and sibling and targeted(adapter.config, _renamed(module, *sibling)):
            found.append(module)
    return found


def unsaved_modules(wanted: Iterable[str], keys: Keys, base: BaseWeights) -> list[str]:
    """Modules of the base that modules_to_save names, and that have no tensor in the adapter. As in PEFT, a name counts
    if the module's name ends in it."""
    ends, have = tuple(wanted), {path for parameter in keys.saved for path in _above(parameter)}
    named = (next((path for path in _above(tensor) if path.endswith(ends)), None) for tensor in base.files.tensors)
    return [one for one in dict.fromkeys(named) if one is not None and not any(_alike(one, other) for other in have)]


def _above(parameter: str) -> Iterator[str]:
    """Names of the modules that contain a parameter, the outermost first."""
    parts = parameter.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _alike(one: str, other: str) -> bool:
    """Whether two names mean one module; either may lack a prefix."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _numberless(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module)


def _renamed(module: str, sibling: str, key: str) -> str:
    """The adapter's name of a base module, with or without a prefix as its name `key` of the module `sibling` shows."""
    return module[len(sibling) - len(key) :] if sibling.endswith(key) else key.removesuffix(sibling) + module


def _in_layers(config: dict[str, Any], module: str) -> bool:
    """Whether layers_to_transform has the module's layer: the number behind the first part of its name that
    layers_pattern names."""
    stated = config.get("layers_to_transform")
    wanted = [stated] if isinstance(stated, int) else stated
    if not wanted:
        return True
    stacks = _texts(config.get("layers_pattern"))
    patterns = [rf"(?:^|.*?\.){stack}\.(?P<idx>\d+)\." for stack in stacks] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    found = next((match for pattern in patterns if (match := _match(pattern, module))), None)
    return found is not None and int(found["idx"]) in wanted


def _named(stated: object, module: str) -> bool:
    """Whether `stated` names the module: a regular expression for the whole name, or a list of last parts."""
    if isinstance(stated, str):
        return bool(stated) and _match(stated, module, re.fullmatch) is not None
    return any(module == name or module.endswith(f".{name}") for name in _texts(stated))


def _texts(stated: object) -> list[str]:
    if isinstance(stated, str):
        return [stated] if stated else []
    return [one for one in stated if isinstance(one, str)] if isinstance(stated, list) else []


def _match(pattern: str, name: str, match: _By = re.match) -> re.Match[str] | None:
    try:
        return match(pattern, name)
    except re.error as error:
        raise CheckpointError(f"pattern {shown(pattern)} is no regular expression: {error}") from error

"""Which field of config.json keeps a class from being built: each is left out in turn, so that what is named is why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from duat_cli.text import clean, shown

_MOST = 24  # trials; each builds the config, or the modules as well
_KEPT = ("model_type", "architectures", "num_hidden_layers", "n_layer", "auto_map")  # what is built, and how much of it


def blamed(config: dict[str, Any], error: str, builds: Callable[[dict[str, Any]], bool], kind: type = object) -> str:
    """ "; hidden_act 'swoosh' is why: without it the error is gone"; empty where no single field is, or it is named.

    config: as written. error: what was said. builds: whether a config does without that error. Fields whose value the
    error has come first; a yes or no is turned round, as the default may be the same. kind: of the values to try.
    """
    stated = [found for found in _paths(config, ()) if isinstance(found[1], kind)]
    paths = sorted(stated, key=lambda found: (_text(found[1]) not in error, len(found[0])))
    for path, value in paths[:_MOST]:
        if builds(_without(config, path, value)):
            named = f"{clean('.'.join(path))} {shown(value) if isinstance(value, str) else clean(_text(value))}"
            return "" if path[-1] in error else f"; {named} is why: without it this error is gone"
    return ""


def _paths(config: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _paths(value, (*above, name))
        elif name not in _KEPT and value is not None:
            yield (*above, name), value


def _without(config: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *above, name = path
    inner = changed
    for part in above:
        inner = inner[part]
    if isinstance(value, bool):
        inner[name] = not value
    else:
        del inner[name]
    return changed


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

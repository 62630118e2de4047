"""The field of config.json that keeps a class from being built, or that contradicts the shapes of the weights. Each
candidate is tried out, so the field that is named is the reason, or its new value would fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duat_cli.loading.checkpoint.preflight import config_fields
from duat_cli.text import clean, shown

_MOST = 24  # trials; each builds the config or the modules again
_KEPT = ("model_type", "architectures", "num_hidden_layers", "n_layer", "auto_map")  # what is built, and its depth


def blamed(config: dict[str, Any], error: str, builds: Callable[[dict[str, Any]], bool], kind: type = object) -> str:
    """The end of an error message, such as "; hidden_act 'swoosh' is why: without it this error is gone". Empty where
    no single field is the reason, or where the error names the field already.

    config: as written. error: the text of the error. builds: whether a config can be built without that error. Fields
    whose value appears in the error are tried first. A boolean is inverted, not left out, because it may equal its
    default. kind: type of the values to try.
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
    changed, inner = _copied(config, path)
    if isinstance(value, bool):
        inner[path[-1]] = not value
    else:
        del inner[path[-1]]
    return changed


def _copied(config: dict[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the config, and the dict in it that holds the last part of the path."""
    changed = copy.deepcopy(config)
    inner = changed
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    return changed, inner


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


Shape = tuple[int, ...]
_NO_SIZES = ("_id", "_ids", "layer", "layers")  # the number of blocks appears in no shape, and takes long to try
_LARGEST = 64  # times the side or the value, whichever is larger; a larger number would build a model that nobody has


def fitting_fields(
    config: dict[str, Any],
    defaults: dict[str, Any],
    shapes: Mapping[str, tuple[Shape, Shape]],
    fits: Callable[[dict[str, Any]], bool],
) -> list[tuple[str, int, int]]:
    """(field, its value, the value that would fit) for every single field that explains all wrong shapes.

    config: as written; defaults: the config with the fields it does not state. shapes: tensor -> (stored, wanted by the
    config). fits: whether a config matches the files. A field's candidates are the values it would have if a side were
    proportional to it or to its inverse, or if it were a summand of a side.
    """
    found: dict[str, tuple[str, int, int]] = {}
    fields = [*config_fields(defaults), *config_fields(config)]
    numbers = {name: v for name, v in fields if type(v) is int and v >= 0 and not name.endswith(_NO_SIZES)}
    for tried, (path, value, other) in enumerate(_candidates(numbers, shapes)):
        if tried >= _MOST:
            break
        if path not in found and fits(_with(config, path, other)):
            found[path] = (path, value, other)
    return list(found.values())


def _candidates(numbers: dict[str, int], shapes: Mapping[str, tuple[Shape, Shape]]) -> Iterator[tuple[str, int, int]]:
    """Candidates, those first that explain the most tensors; a field that explains few tensors cannot explain all."""
    sides = [
        (stored, wanted)
        for pair in shapes.values()
        if len(pair[0]) == len(pair[1])
        for stored, wanted in zip(*pair, strict=True)
        if stored != wanted
    ]
    votes: dict[tuple[str, int, int], int] = {}
    for path, value in numbers.items():
        for stored, wanted in sides:
            options = {value + stored - wanted}
            for one, two in ((stored, wanted), (wanted, stored)):
                if two and value * one % two == 0:
                    options.add(value * one // two)
            for other in options - {value}:
                if 0 < other <= _LARGEST * max(stored, value):
                    votes[path, value, other] = votes.get((path, value, other), 0) + 1
    yield from sorted(votes, key=lambda found: (-votes[found], found))


def _with(config: dict[str, Any], path: str, value: int) -> dict[str, Any]:
    parts = path.split(".")
    changed, inner = _copied(config, parts)
    inner[parts[-1]] = value
    return changed

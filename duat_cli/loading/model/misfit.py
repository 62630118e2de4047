"""Which field of config.json contradicts the shapes of the weights: tried out, so that what is named would fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]
_MOST = 24  # rehearsals; each builds the modules once more
_NO_SIZES = ("_id", "_ids", "layer", "layers")  # a number of blocks is in no shape, and takes long to try
_LARGEST = 64  # times the side or the value; a larger number would build a model that nobody has


def fitting_fields(
    config: dict[str, Any],
    defaults: dict[str, Any],
    shapes: Mapping[str, tuple[Shape, Shape]],
    fits: Callable[[dict[str, Any]], bool],
) -> list[tuple[str, int, int]]:
    """(field, its value, the one that would fit) of every single field that explains all wrong shapes.

    config: as written; defaults: with what it does not state. shapes: tensor -> (stored, wanted by the config).
    fits: whether a config goes with the files. A field's candidates are what its value would be if a side were
    proportional to it or to its inverse, or if it were added in a side.
    """
    found: dict[str, tuple[str, int, int]] = {}
    numbers = dict(_numbers(defaults, "")) | dict(_numbers(config, ""))
    for tried, (path, value, other) in enumerate(_candidates(numbers, shapes)):
        if tried >= _MOST:
            break
        if path not in found and fits(_with(config, path, other)):
            found[path] = (path, value, other)
    return list(found.values())


def _candidates(numbers: dict[str, int], shapes: Mapping[str, tuple[Shape, Shape]]) -> Iterator[tuple[str, int, int]]:
    """Those first that explain the most tensors; a field that explains few of them cannot explain all."""
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


def _numbers(config: dict[str, Any], above: str) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if type(value) is int and value >= 0 and not name.endswith(_NO_SIZES):
            yield above + name, value
        elif isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value, f"{above}{name}.")


def _with(config: dict[str, Any], path: str, value: int) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(config)
    *above, name = path.split(".")
    inner = changed
    for part in above:
        inner = inner.setdefault(part, {})
    inner[name] = value
    return changed

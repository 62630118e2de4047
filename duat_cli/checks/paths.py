"""Fields of the inspect report by path, such as 'blocks.12.coupling.first_token_share', and patterns over paths.

A pattern is compared part by part, each as a shell pattern (`*`, `?`, `[1-3]`); `**` stands for any number of parts.
Blocks are named by their index, entries of other lists by position.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from pydantic import BaseModel

from duat_cli.results.base import WithReasons
from duat_cli.results.inspect import Block, InspectReport, PromptBlock
from duat_cli.results.meaning import UNSAID, Meaning, Option, meaning_of

_LONGEST, _PARTS = 400, 40  # characters and parts of a pattern; the deepest field has seven


@dataclass(frozen=True)
class Place:
    """A number of a report, or a group of numbers, with the metadata of the fields on the path to it."""

    path: str
    """The path, with `#` for a place in a list."""
    meaning: Meaning = UNSAID
    """The metadata of the last field on the path."""
    is_number: bool = False
    watched: bool = True
    """Whether it and all groups around it are drift metrics by their metadata."""
    needs: frozenset[Option] = frozenset()
    """Options without which it has no value."""
    rule: str = ""
    """The rule of its metrics, stated by the innermost group that has one."""
    by_name: frozenset[str] = frozenset()
    """Groups on the path that a pattern must name."""
    needs_inside: frozenset[Option] = frozenset()
    """Those of `needs` that come from fields inside such a group."""

    def inner(self, name: str, meaning: Meaning) -> Place:
        """The field of that name inside this place."""
        asked: frozenset[Option] = frozenset({meaning.needs} if meaning.needs else ())
        return Place(
            f"{self.path}.{name}".lstrip("."),
            meaning,
            watched=self.watched and meaning.drift is not None,
            needs=self.needs | asked,
            rule=meaning.rule or self.rule,
            by_name=self.by_name | ({name} if meaning.by_name else set()),
            needs_inside=self.needs_inside | (asked if self.by_name else frozenset()),
        )


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches this path. Wildcards do not match groups that a pattern must name."""
    parts = pattern.split(".")
    return _meet(parts, path.split("."), fnmatchcase) and place_of(path).by_name <= set(parts)


def _meet(pattern: list[str], path: list[str], fits: Callable[[str, str], bool]) -> bool:
    """Whether a pattern matches this path, or some path at this place. fits: whether a part of the path, its first
    argument, matches a part of the pattern."""
    reached = {0}  # positions in the path that the beginning of the pattern can match up to
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(path) and fits(path[at], part)}
    return len(path) in reached


def flatten(report: BaseModel) -> tuple[dict[str, float], dict[str, str]]:
    """(path -> value of every number, path -> reason of every number that is null)."""
    values: dict[str, float] = {}
    reasons: dict[str, str] = {}
    _walk(report, "", values, reasons)
    return values, reasons


def _walk(value: object, path: str, values: dict[str, float], reasons: dict[str, str]) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        values[path] = float(value)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if not meaning_of(type(value), name).checked:
                continue
            inner, here = getattr(value, name), f"{path}.{name}".lstrip(".")
            if inner is None and isinstance(value, WithReasons) and name in value.reasons:
                reasons[here] = value.reasons[name]
            _walk(inner, here, values, reasons)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _walk(inner, f"{path}.{key}", values, reasons)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _walk(inner, f"{path}.{_number(inner, number)}", values, reasons)


def _number(value: object, position: int) -> int:
    if isinstance(value, Block):
        return value.index
    return value.prompt if isinstance(value, PromptBlock) else position


def block_index(path: str) -> int | None:
    """The index of the block that a number belongs to, or None."""
    found = re.match(r"blocks\.(\d{1,6})\.", path)
    return int(found[1]) if found else None


# --- what the report can hold --------------------------------------------------------------------------


@functools.cache
def places(report: type[BaseModel] = InspectReport) -> dict[str, Place]:
    """Path -> place, for every number that a report can have and every group of numbers."""
    return {place.path: place for place in _fields(report, Place(""))}


def place_of(path: str, report: type[BaseModel] = InspectReport) -> Place:
    """The place of a path in a report; one without metadata for a path that no report has, such as that of a tensor."""
    general = ".".join("#" if part.isdecimal() else part for part in path.split("."))
    return places(report).get(general, Place(path, watched=False))


@functools.cache
def known_paths() -> tuple[str, ...]:
    """The path of every number that an inspect report can have."""
    return tuple(path for path, place in places().items() if place.is_number)


def _fields(model: type[BaseModel], above: Place) -> Iterator[Place]:
    hints = typing.get_type_hints(model)
    for name in model.model_fields:
        meaning = meaning_of(model, name)
        if meaning.checked:
            yield from _places(hints[name], above.inner(name, meaning))


def _places(hint: object, place: Place) -> Iterator[Place]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        yield replace(place, is_number=True)
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        yield place
        yield from _fields(hint, place)
    elif origin is list:
        yield from _places(inner[0], replace(place, path=f"{place.path}.#"))
    elif origin is dict and place.meaning.keyed_by is not None:
        for key in _fields(place.meaning.keyed_by, Place("")):
            if key.is_number and "." in key.path and not key.by_name:
                path = f"{place.path}.{key.path}"
                yield from _places(inner[1], replace(place, path=path, needs=place.needs | key.needs))
    elif origin in (typing.Union, types.UnionType):
        yield from (found for kind in inner for found in _places(kind, place))


def is_known(pattern: str) -> bool:
    """Whether a report could have a number that matches a pattern."""
    if len(pattern) > _LONGEST or pattern.count(".") >= _PARTS:
        return False
    parts = pattern.split(".")
    return any(_meet(parts, path.split("."), _fits) for path in known_paths())


def _fits(place: str, part: str) -> bool:
    if place == "#":
        return part.isdecimal() or any(c in part for c in "*?[")
    return fnmatchcase(place, part)


def asks_for(pattern: str) -> frozenset[Option]:
    """The options that a pattern asks for: those that all its fields need, and those of groups that it names. These
    fields are then computed."""
    found = _numbers_of(pattern)
    every = frozenset.intersection(*(place.needs for place in found)) if found else frozenset()
    return every.union(*(place.needs_inside for place in found))


def leaves_out(pattern: str) -> list[str]:
    """Fields that a pattern matches beside others, and that stay null because an option for them is not given."""
    names = {p.path.rsplit(".", maxsplit=1)[-1] for p in _numbers_of(pattern) if p.meaning.needs == "spectrum"}
    return [] if "spectrum" in asks_for(pattern) else sorted(names)


def is_metric(pattern: str) -> bool:
    """Whether a pattern matches a number that a baseline holds."""
    return any(place.watched for place in _numbers_of(pattern))


def may_be_negative(pattern: str) -> bool:
    """Whether some field of a pattern may be negative; assumed for a pattern that ends in a wildcard."""
    return pattern.rsplit(".", maxsplit=1)[-1] in ("*", "**") or any(p.meaning.signed for p in _numbers_of(pattern))


def _numbers_of(pattern: str) -> list[Place]:
    """The numbers that a pattern matches."""
    parts = pattern.split(".")
    found = [places()[path] for path in known_paths() if _meet(parts, path.split("."), _fits)]
    return [place for place in found if place.by_name <= set(parts)]

"""Fields of the inspect report by path: 'blocks.12.coupling.first_token_share', and patterns over them.

A pattern is compared part by part, each as a shell pattern (`*`, `?`, `[1-3]`); `**` stands for any number of
parts. Blocks go by their index, other lists by position.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase

from pydantic import BaseModel

from duat_cli.results.base import WithReasons
from duat_cli.results.inspect import Block, InspectReport, PromptBlock

_WITHOUT_NUMBERS = {"run", "reasons", "environment"}  # nothing that time or the machine sets is a check
_LONGEST, _PARTS = 400, 40  # characters and parts of a pattern; the deepest field has seven
_SPREAD_NAMES = ("*.*", "*.*.*", "*.*.*.*")
_SPECTRAL = ("spectral_norm", "stable_rank")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern is one of this path. Wildcards do not reach the nulls: a bound on those names them."""
    parts, places = tuple(pattern.split(".")), tuple(path.split("."))
    return ("null" not in places or "null" in parts) and _matches(parts, places)


def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Positions of the path that the pattern's beginning can have reached, part by part."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(path) and fnmatchcase(path[at], part)}
    return len(path) in reached


def flatten(report: InspectReport) -> tuple[dict[str, float], dict[str, str]]:
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
            if name in _WITHOUT_NUMBERS:
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


# --- what the report can hold --------------------------------------------------------------------------


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Every number that an inspect report can have; `#` stands for a place in a list, `*` for a name."""
    return tuple(_fields(InspectReport, ""))


def _fields(model: type[BaseModel], path: str) -> Iterator[str]:
    hints = typing.get_type_hints(model)
    for name in model.model_fields:
        if name not in _WITHOUT_NUMBERS:
            yield from _places(hints[name], f"{path}.{name}".lstrip("."))


def _places(hint: object, path: str) -> Iterator[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        yield path
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        yield from _fields(hint, path)
    elif origin is list:
        yield from _places(inner[0], f"{path}.#")
    elif origin is dict:  # of the spreads, whose names are fields: 'coupling.entropy_bits', 'terms.linear.share'
        for names in _SPREAD_NAMES:
            yield from _places(inner[1], f"{path}.{names}")
    elif origin in (typing.Union, types.UnionType):
        yield from (place for kind in inner for place in _places(kind, path))


def is_known(pattern: str) -> bool:
    """Whether a report could have a number at a pattern."""
    if len(pattern) > _LONGEST or pattern.count(".") >= _PARTS:
        return False
    return bool(_places_of(pattern))


def _overlap(pattern: list[str], place: list[str]) -> bool:
    """Whether some path is one of both."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(place) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(place) and _fits(part, place[at])}
    return len(place) in reached


def _fits(part: str, place: str) -> bool:
    if place == "*":
        return True
    if place == "#":
        return part.isdecimal() or any(c in part for c in "*?[")
    return fnmatchcase(place, part)


def needs(path: str) -> set[str]:
    """The options of `duat inspect` without which the report has no number at a path."""
    parts = path.split(".")
    wanted = {"spectrum"} if any(part in _SPECTRAL for part in parts) else set()
    if parts[0] == "terms":
        wanted.add("terms")
    if parts[0] == "blocks" and len(parts) > 2 and parts[2] in ("prompts", "spreads"):
        wanted.add("per_prompt")
    if "null" in parts and "uniform" not in parts:
        wanted.add("null")
    return wanted


def asks_for(pattern: str) -> set[str]:
    """The options that every field of a pattern needs: it was written for these fields, so they are computed."""
    places = _places_of(pattern)
    return needs(pattern) | (set.intersection(*map(needs, places)) if places else set())


def leaves_out(pattern: str) -> list[str]:
    """Fields of every report that a pattern matches among others, and that stay null for want of an option."""
    names = {place.rsplit(".", maxsplit=1)[-1] for place in _places_of(pattern)}
    return [] if "spectrum" in asks_for(pattern) else sorted(names & set(_SPECTRAL))


def _places_of(pattern: str) -> list[str]:
    parts = pattern.split(".")
    return [place for place in known_paths() if _overlap(parts, place.split("."))]

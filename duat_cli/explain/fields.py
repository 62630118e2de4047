"""The fields of all reports: their places, and what their declarations say."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from duat_cli.report.headers import headers
from duat_cli.report.schema import REPORTS, STACKS
from duat_cli.results.base import Result
from duat_cli.results.check import UndecidedReport
from duat_cli.results.explained.report import Explanation
from duat_cli.results.meaning import Meaning, Option, meaning_of

_OTHERS: list[tuple[str, type[BaseModel]]] = [*STACKS.items(), ("check", UndecidedReport)]
"""Results that a command may return in place of its report."""
_NULLS = ("blocks[].null.reinitialised.", "blocks[].null.uniform.")


@dataclass
class _Found:
    """One field of one result model, and its places in the reports."""

    model: type[BaseModel]
    info: FieldInfo
    places: list[tuple[str, str]] = field(default_factory=list)
    """(report, path); in a path, [] stands for a list index and * for a name."""
    needs: list[frozenset[Option]] = field(default_factory=list)
    """For each place, the options that it, or a group around it, needs."""


def fields() -> list[Explanation]:
    """Every field; fields of different models with equal name and meaning become one entry."""
    found: dict[tuple[type[BaseModel], str], _Found] = {}
    known = set[tuple[str, str]]()
    others = [(report, model) for report, model in _OTHERS if report in REPORTS]
    for report, model in [*REPORTS.items(), *others]:
        for path, owner, info, needs in _walk(model, "", frozenset()):
            if (report, path) in known or (path.startswith("stacks[]") and report in STACKS):
                continue  # another report of the command has it
            known.add((report, path))
            one = found.setdefault((owner, path.rpartition(".")[2]), _Found(owner, info))
            one.places.append((report, path))
            one.needs.append(needs)
    merged: dict[tuple[object, ...], Explanation] = {}
    for (_, name), one in found.items():
        entry = _explanation(name, one, known)
        alike = (entry.name, entry.definition, entry.formula, entry.unit, entry.exact, tuple(entry.facts.items()))
        other = merged.get(alike)
        merged[alike] = entry if other is None else _together(other, entry)
    return list(merged.values())


def _walk(
    model: type[BaseModel], path: str, around: frozenset[Option]
) -> Iterator[tuple[str, type[BaseModel], FieldInfo, frozenset[Option]]]:
    """Every field inside a model: (path, model that has it, field's declaration, options that it needs)."""
    for name, info in model.model_fields.items():
        here, asked = f"{path}.{name}".lstrip("."), meaning_of(model, name).needs
        needs = around | ({asked} if asked else set())
        yield here, model, info, needs
        for inner, place in _models(info.annotation, here):
            yield from _walk(inner, place, needs)


def _models(hint: object, path: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The result models inside a field's type, each with the path that leads to it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint, path
    elif origin is list:
        yield from _models(inner[0], f"{path}[]")
    elif origin is dict:
        yield from _models(inner[1], f"{path}.*")
    else:
        for kind in inner:
            yield from _models(kind, path)


def _explanation(name: str, one: _Found, every: set[tuple[str, str]]) -> Explanation:
    meaning = meaning_of(one.model, name)
    return Explanation(
        name=name,
        kind="field",
        where=[f"{report}: {path}" for report, path in one.places],
        columns=[f"{report}: {header}" for report, path in one.places for header in headers().get((report, path), [])],
        definition=_definition(one.info),
        nulls=_nulls(one.places, every),
        facts=_facts(meaning, frozenset.intersection(*one.needs)),
        page=None,
        formula=meaning.formula or None,
        source=meaning.source or None,
        unit=meaning.unit or None,
        exact=meaning.exact or None,
    )


def _facts(meaning: Meaning, needs: frozenset[Option]) -> dict[str, str]:
    """Facts in a field's metadata that have no place of their own in an explanation. needs: options that it needs at
    every place."""
    facts = {}
    if meaning.signed:
        facts["sign"] = "may be below zero"
    if needs:
        facts["needs"] = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(needs))
    if meaning.drift in ("number", "norm"):
        facts["baseline"] = "a metric of duat check --baseline"
    return facts


def _definition(info: FieldInfo) -> str:
    """The field's description; for a part of a report without one, the docstring of its model."""
    if info.description:
        return info.description
    for model, _ in _models(info.annotation, ""):
        if model.__doc__ and model.__doc__ != Result.__doc__:
            return inspect.cleandoc(model.__doc__).partition("\n\n")[0].replace("\n", " ")
    return ""


def _nulls(places: list[tuple[str, str]], every: set[tuple[str, str]]) -> list[str]:
    """Paths at which an inspect report has the nulls of a statistic of its blocks."""
    found = []
    for report, path in places:
        rest = path.removeprefix("blocks[].")
        found += [null + rest for null in _NULLS if rest != path and (report, null + rest) in every]
    return found


def _together(one: Explanation, other: Explanation) -> Explanation:
    more = {name: [*getattr(one, name), *getattr(other, name)] for name in ("where", "columns", "nulls")}
    return one.model_copy(update=more)

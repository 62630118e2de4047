"""Means over prompts of result models, field by field."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from duat_cli.results.inspect import Spread
from duat_cli.results.meaning import OverPrompts, meaning_of

R = TypeVar("R", bound=BaseModel)


def mean_over(results: Sequence[R]) -> R:
    """One result over the prompts, each field as its metadata says; null anywhere is null, with its reason."""
    kind = type(results[0])
    merged = {name: _merge(kind, name, [getattr(r, name) for r in results]) for name in kind.model_fields}
    return kind.model_validate(merged)


def _merge(kind: type[BaseModel], name: str, values: list[Any]) -> object:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], BaseModel):
        return mean_over(values)
    if all(value == values[0] for value in values):
        return values[0]
    how = meaning_of(kind, name).over_prompts
    if how == "same":
        raise ValueError(f"{kind.__name__}.{name} differs between prompts, and its metadata has no way to merge it")
    return _MERGED[how](values)


def _first_reasons(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Every field's reason, of several the first."""
    return {name: why for reasons in reversed(values) for name, why in reasons.items()}


_MERGED: dict[OverPrompts, Callable[[Sequence[Any]], object]] = {
    "mean": statistics.fmean,
    "largest": max,
    "reasons": _first_reasons,
}


def spreads(results: Mapping[str, Sequence[BaseModel]]) -> dict[str, Spread]:
    """'group.field' to its spread, for every number that has a value under every prompt."""
    found: dict[str, Spread] = {}
    for group, models in results.items():
        for name in type(models[0]).model_fields:
            values = [getattr(m, name) for m in models]
            if all(isinstance(v, BaseModel) for v in values):
                found |= spreads({f"{group}.{name}": values})
            elif all(isinstance(v, float) for v in values):
                found[f"{group}.{name}"] = Spread(
                    low=min(values),
                    mean=statistics.fmean(values),
                    high=max(values),
                    standard_deviation=statistics.pstdev(values),
                )
    return found

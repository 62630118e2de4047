"""Means over prompts of result models, field by field."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel

from duat_cli.results.inspect import Spread

R = TypeVar("R", bound=BaseModel)


def mean_over(results: Sequence[R]) -> R:
    """One result whose numbers are means; a certificate is the largest, and null anywhere is null, with its reason."""
    first = results[0]
    merged: dict[str, object] = {}
    for name in type(first).model_fields:
        values = [getattr(r, name) for r in results]
        merged[name] = _merge(name, values)
    return type(first).model_validate(merged)


def _merge(name: str, values: list[object]) -> object:
    first = values[0]
    if isinstance(first, Mapping):  # reasons
        return {k: v for reasons in reversed(values) for k, v in reasons.items()}  # type: ignore[attr-defined]
    if any(value is None for value in values):
        return None
    if isinstance(first, BaseModel):
        return mean_over(values)  # type: ignore[type-var]
    if all(value == first for value in values):
        return first
    if name.endswith("certificate_error"):
        return max(values)  # type: ignore[type-var]
    return statistics.fmean(values)  # type: ignore[arg-type]


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

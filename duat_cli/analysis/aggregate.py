"""Means over prompts of result models, field by field: of any number of prompts, in constant memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from duat_cli.results.inspect import Spread
from duat_cli.results.meaning import meaning_of

R = TypeVar("R", bound=BaseModel)
_SMALLEST = 1074  # every finite float is a whole multiple of 2^-1074


def mean_over(results: Sequence[R]) -> R:
    """One result over the prompts, each field as its metadata says; null anywhere is null, with its reason."""
    mean: Mean[R] = Mean()
    for result in results:
        mean.add(result)
    return mean.value()


class ExactSum:
    """A sum of finite floats without rounding, so that it does not depend on their order."""

    def __init__(self) -> None:
        self._units = self._count = 0

    def add(self, value: float) -> None:
        numerator, denominator = value.as_integer_ratio()
        self._units += numerator << (_SMALLEST + 1 - denominator.bit_length())
        self._count += 1

    def mean(self) -> float:
        """The rounded sum over the count, bit for bit `statistics.fmean`."""
        return self._units / (1 << _SMALLEST) / self._count


class Mean(Generic[R]):
    """The mean of results that come one after the other; of reasons that differ the first is kept."""

    def __init__(self) -> None:
        self._kind: type[R] | None = None
        self._fields: dict[str, _Field] = {}

    def add(self, result: R) -> None:
        if self._kind is None:
            self._kind = type(result)
            self._fields = {name: _Field(self._kind, name) for name in self._kind.model_fields}
        for name, field in self._fields.items():
            field.add(getattr(result, name))

    def value(self) -> R:
        """Of one result at least."""
        assert self._kind is not None
        return self._kind.model_validate({name: field.value() for name, field in self._fields.items()})


class _Field:
    """One field over the prompts: what every prompt agrees on, or what its metadata makes of them."""

    def __init__(self, kind: type[BaseModel], name: str) -> None:
        self._where, self._how = f"{kind.__name__}.{name}", meaning_of(kind, name).over_prompts
        self._empty, self._null, self._same = True, False, True
        self._first: Any = None
        self._merged: Any = None

    def add(self, value: Any) -> None:
        self._null = self._null or value is None
        if self._null:
            return
        if self._empty:
            self._empty, self._first, self._merged = False, value, self._start(value)
        self._same = self._same and value == self._first
        if isinstance(self._merged, Mean | ExactSum | _Items):
            self._merged.add(value)
        elif self._how == "largest":
            self._merged = max(self._merged, value)
        elif self._how == "reasons":
            self._merged = {**value, **self._merged}

    def _start(self, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return Mean()
        if isinstance(value, list) and self._how == "mean":
            return _Items()
        return ExactSum() if self._how == "mean" and isinstance(value, float | int) else value

    def value(self) -> object:
        if self._null:
            return None
        if isinstance(self._merged, Mean | _Items):
            return self._merged.value()
        if self._same:
            return self._first
        if isinstance(self._merged, ExactSum):
            return self._merged.mean()
        if self._how not in ("largest", "reasons"):
            raise ValueError(f"{self._where} differs between prompts, and its metadata has no way to merge it")
        return self._merged


class _Items:
    """Lists of results or numbers, place by place, as far as the shortest goes."""

    def __init__(self) -> None:
        self._means: list[Mean[BaseModel] | ExactSum] | None = None

    def add(self, values: list[Any]) -> None:
        if self._means is None:
            self._means = [Mean() if isinstance(value, BaseModel) else ExactSum() for value in values]
        self._means = self._means[: len(values)]
        for mean, value in zip(self._means, values, strict=False):
            mean.add(value)

    def value(self) -> list[object]:
        return [mean.value() if isinstance(mean, Mean) else mean.mean() for mean in self._means or []]


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

"""Means over prompts of result models, field by field, for any number of prompts in constant memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from duat_cli.results.inspect import Spread
from duat_cli.results.meaning import meaning_of

R = TypeVar("R", bound=BaseModel)
_AT_ONCE = 16  # results that are added together
_KEPT = 64  # most floats of a sum that are kept as they came


def mean_over(results: Sequence[R]) -> R:
    """One result over the prompts. Fields are merged as their metadata says; a null for any prompt stays, with
    reason."""
    mean: Mean[R] = Mean()
    for result in results:
        mean.add(result)
    return mean.value()


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean of values; None where one of them is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


class ExactSum:
    """An exact sum of finite floats, which so does not depend on their order. It is kept as a few floats with the same
    exact sum (Shewchuk 1997), followed by the latest floats as they came."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._count = 0

    def add(self, value: float) -> None:
        self.add_all([value])

    def add_all(self, values: list[float]) -> None:
        self._parts += values
        self._count += len(values)
        if len(self._parts) > _KEPT:
            parts, left = [], self._parts
            while part := math.fsum(left):  # the rounded sum, then the rounded remainder, and so on
                parts.append(part)
                left.append(-part)
            self._parts = parts

    def mean(self) -> float:
        """The rounded sum divided by the count, bit for bit `statistics.fmean`."""
        return math.fsum(self._parts) / self._count


class Mean(Generic[R]):
    """The mean of results that come one after the other. If reasons differ, the first is kept."""

    def __init__(self) -> None:
        self._kind: type[R] | None = None
        self._fields: dict[str, _Field] = {}
        self._waiting: list[R] = []  # to be added together, field by field, which is several times as fast

    def add(self, result: R) -> None:
        self._waiting.append(result)
        if len(self._waiting) >= _AT_ONCE:
            self._take()

    def add_all(self, results: list[R]) -> None:
        self._waiting += results
        self._take()

    def _take(self) -> None:
        results, self._waiting = self._waiting, []
        if results and self._kind is None:
            self._kind = type(results[0])
            self._fields = {name: _Field(self._kind, name) for name in self._kind.model_fields}
        for name, field in self._fields.items():
            field.add_all([getattr(result, name) for result in results])

    def value(self) -> R:
        """The mean; at least one result has to be added."""
        self._take()
        assert self._kind is not None
        values = {name: field.value() for name, field in self._fields.items()}
        reasons = values.get("reasons")
        if isinstance(reasons, dict):  # drops reasons of prompts without a value that the mean has
            values["reasons"] = {name: why for name, why in reasons.items() if values.get(name) is None}
        return self._kind.model_validate(values)


class _Field:
    """One field over the prompts: its value if all prompts agree, otherwise merged as its metadata says."""

    def __init__(self, kind: type[BaseModel], name: str) -> None:
        self._where, self._how = f"{kind.__name__}.{name}", meaning_of(kind, name).over_prompts
        self._empty, self._null, self._same = True, False, True
        self._first: Any = None
        self._merged: Any = None

    def add_all(self, values: list[Any]) -> None:
        if self._how == "known":
            values = [value for value in values if value is not None]
        self._null = self._null or any(value is None for value in values)
        if self._null or not values:
            return
        if self._empty:
            self._empty, self._first, self._merged = False, values[0], self._start(values[0])
        self._same = self._same and values.count(self._first) == len(values)
        if isinstance(self._merged, Mean | ExactSum | _Items):
            self._merged.add_all(values)
        elif self._how == "sum":
            self._merged += sum(values)
        elif self._how == "largest":
            self._merged = max(self._merged, *values)
        elif self._how == "reasons":
            for value in values:
                self._merged = {**value, **self._merged}

    def _start(self, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return Mean()
        if self._how == "sum":
            return 0
        if isinstance(value, list) and self._how == "mean":
            return _Items()
        return ExactSum() if self._how in ("mean", "known") and isinstance(value, float | int) else value

    def value(self) -> object:
        if self._null or self._empty:  # empty: no prompt has it
            return None
        if isinstance(self._merged, Mean | _Items):
            return self._merged.value()
        if self._same and self._how != "sum":
            return self._first
        if isinstance(self._merged, ExactSum):
            return self._merged.mean()
        if self._how not in ("largest", "sum", "reasons"):
            raise ValueError(f"{self._where} differs between prompts, and its metadata has no way to merge it")
        return self._merged


class _Items:
    """Lists of results or numbers, merged place by place up to the length of the shortest."""

    def __init__(self) -> None:
        self._means: list[Mean[BaseModel] | ExactSum] | None = None

    def add_all(self, every: list[list[Any]]) -> None:
        if self._means is None:
            self._means = [Mean() if isinstance(value, BaseModel) else ExactSum() for value in every[0]]
        self._means = self._means[: min(map(len, every))]
        for place, mean in enumerate(self._means):
            mean.add_all([values[place] for values in every])

    def value(self) -> list[object]:
        return [mean.value() if isinstance(mean, Mean) else mean.mean() for mean in self._means or []]


def spreads(results: Mapping[str, Sequence[BaseModel]]) -> dict[str, Spread]:
    """Spread of every number that has a value under every prompt, by 'group.field'."""
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

"""Scales, which map values to places on a picture, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duat_cli.report.tables import numbers

_SLACK = 1e-4  # share of a step that is ignored, so that rounding of a value does not add a step
_DIGITS = 4  # most digits behind the point for which labels beside an axis have room
_EMPTY = (0.0, 1.0)  # the range of an axis without any value


@dataclass(frozen=True)
class Linear:
    low: float
    high: float
    percent: bool = False
    """Whether labels are the values times 100."""
    count: int = 5
    """Approximate number of ticks."""

    @classmethod
    def over(cls, values: Iterable[float | None], *, zero: bool = True, percent: bool = False) -> Linear:
        """A range with round ends that holds all values. zero: whether it has to hold 0, too."""
        known = [value for value in values if value is not None]
        low, high = (min(known), max(known)) if known else _EMPTY
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            low, high = (low, low + 1) if zero else (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9)
        step = _step(high - low, 5)
        return cls(math.floor(low / step + _SLACK) * step, math.ceil(high / step - _SLACK) * step, percent)

    def __call__(self, value: float, /) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        step = _step(self.high - self.low, self.count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        shown = 100 * step if self.percent else step
        digits = max(0, -math.floor(math.log10(shown) + 1e-9))
        digits += abs(round(shown, digits) - shown) > _SLACK * shown  # a step of 0.25 needs one digit more than 0.2
        values = [k * step for k in range(first, last + 1)]
        if digits > _DIGITS and max(map(abs, values)) < 1e-3 and not self.percent:
            return [(v, _small(round(v, digits))) for v in values]
        return [(v, _round(100 * v if self.percent else v, digits)) for v in values]


@dataclass(frozen=True)
class Log:
    """A logarithmic scale for positive values, with ticks at powers of ten."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Log:
        """A range between powers of ten that holds all positive values."""
        known = [math.log10(value) for value in values if value is not None and value > 0]
        low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (0, 1)
        return cls(10.0**low, 10.0 ** max(high, low + 1))

    def __call__(self, value: float, /) -> float:
        return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))

    def ticks(self) -> list[tuple[float, str]]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        step = max(1, math.ceil((last - first) / 8))
        return [(10.0**k, f"1e{k}" if abs(k) > 2 else f"{10.0**k:g}") for k in range(first, last + 1, step)]


@dataclass(frozen=True)
class Band:
    """Entries of a list in equal bands; a value is the number of an entry, from 0."""

    names: Sequence[str]
    most: int = 20
    """How many ticks fit."""

    @property
    def width(self) -> float:
        """Width of a band."""
        return 1 / max(1, len(self.names))

    def __call__(self, value: float, /) -> float:
        return (value + 0.5) * self.width

    def ticks(self) -> list[tuple[float, str]]:
        step = next(s for s in _steps() if len(self.names) <= s * max(1, self.most))
        return [(float(i), name) for i, name in enumerate(self.names) if i % step == 0]


Scale = Linear | Log | Band
"""The scale of an axis. Places are in the unit interval, from its beginning to its end; a tick is (value, label)."""


def _steps() -> Iterable[int]:
    """Round steps: 1, 2, 5, 10, 20, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _step(span: float, count: int) -> float:
    """The round step that cuts a span into about `count` parts."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw * (1 - 1e-9))


def _round(value: float, digits: int) -> str:
    if abs(value) >= 1e5:
        return numbers.plain(value)
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _small(value: float) -> str:
    """A small number by its exponent, such as 1.5e-5, which is clear and short enough to stand beside an axis."""
    return f"{value:.3g}".replace("e-0", "e-") if value else "0"

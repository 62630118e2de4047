"""Formats of numbers for readers: three digits, with the unit in the header."""

from __future__ import annotations

from collections.abc import Callable

Form = Callable[[float | None], str]

ABSENT = "-"
_ROUNDING = 1e-6  # rounding error of a share in float32
UNITS = {name: 1024**power for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))}
"""Number of bytes in each unit."""
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plain(value: float | None) -> str:
    """Three significant digits: 4.12, 0.013, 1.2e+05."""
    if value is None:
        return ABSENT
    if 999.5 <= abs(value) < 99999.5:
        return f"{value:.0f}"
    if value == 0:
        return "0"
    text = f"{value:#.3g}".rstrip(".")  # 1.00 instead of 1, so that the digits of a column stay aligned
    return text if "e" not in text else f"{value:.1e}"


def percent(value: float | None) -> str:
    """A share in percent, to one decimal. Small shares that are no rounding errors do not print as zero."""
    if value is None:
        return ABSENT
    if abs(value) < _ROUNDING:
        return "0.0"
    if abs(value) < 0.0005:
        return "<0.1" if value > 0 else ">-0.1"
    if 0.9995 <= value < 1:
        return ">99.9"
    return f"{100 * value:.1f}"


def share(value: float | None) -> str:
    """A share in running text, with its unit: 12.3 %."""
    return f"{percent(value)} %"


def error(value: float | None) -> str:
    """A relative error: 3.1e-07, or 0 where nothing is lost."""
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.1e}"


def signed(form: Form) -> Form:
    """The form for a difference, which always has a sign."""
    return lambda value: (
        f"+{form(value)}" if value is not None and form(value)[0].isdigit() and value > 0 else form(value)
    )


SIGNED = signed(plain)


def whole(value: float | None) -> str:
    return ABSENT if value is None else str(round(value))


def fixed(digits: int) -> Form:
    """A form with a fixed number of decimals."""
    return lambda value: ABSENT if value is None else f"{value:.{digits}f}"


def count(value: float) -> str:
    """A count with a letter for its power of ten: 1.24 M."""
    for step, letter in _STEPS:
        if value >= step:
            return f"{value / step:.3g} {letter}"
    return f"{value:.0f}"


def decimal(value: float | None) -> str:
    """Bytes, in powers of 1000, as files are listed: 726 kB."""
    if value is None:
        return ABSENT
    return f"{count(value)}B" if value >= 1e3 else f"{count(value)} B"


def size(value: float) -> str:
    """Bytes, in powers of 1024: 28.1 TiB."""
    unit = unit_of(value)
    number = value / UNITS[unit]
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def unit_of(size: float) -> str:
    """The largest unit in which a size is at least 1."""
    return next((unit for unit, one in reversed(UNITS.items()) if size >= one), "B")

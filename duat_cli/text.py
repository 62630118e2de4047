"""Foreign strings made safe for a terminal: model names, paths, tensor names, messages of other libraries."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

PAPER_PROMPT = "Nui zi created Nui zi dynamics"  # the paper's own example, for a matrix without a given text

# controls (C0, DEL, C1), formats (bidi, zero width), surrogates, line and paragraph separators
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NAMES_SHOWN = 4
_MEASURED = re.compile(r"(?<![\w./-])(\d+\.\d+e[+-]\d+)(?![\w.]*\w)")  # 1.0e-01, but not within a name or version


def clean(text: str) -> str:
    """Text with every character that could steer a terminal, or hide in it, written as its escape."""
    if text.isprintable():  # as nearly every text is; no such character is
        return str(text)  # plain, also of markup
    return "".join(_escape(c) if unicodedata.category(c) in _ESCAPED else c for c in text)


def shown(name: object, limit: int = 120) -> str:
    """A foreign name in quotes, safe for a terminal; cut if it is absurdly long."""
    text = clean(str(name))
    return f"'{text}'" if len(text) <= limit else f"'{text[:limit]}...'"


def expanded(name: str | os.PathLike[str]) -> Path:
    """The path of a name, with ~ and ~user replaced by home folders. For an unknown user the name stays as it is."""
    return Path(os.path.expanduser(name))


def some(texts: Sequence[str], most: int, between: str = ", ", last: str = " and ") -> str:
    """At most so many texts, and the number of the others: 'a, b and 3 more'. last: the text in front of that
    number."""
    more = len(texts) - most
    return between.join(texts[:most]) + (f"{last}{more} more" if more > 0 else "")


def first_of(texts: Sequence[str], most: int, rest: str = "more") -> list[str]:
    """At most so many texts, and a last one with the number of the others: 'and 3 more'."""
    more = len(texts) - most
    return [*texts[:most], *([f"and {more} {rest}"] if more > 0 else [])]


def listed(names: list[str]) -> str:
    """The first few names, sorted, and the number of the others."""
    return some([shown(name) for name in sorted(names)], _NAMES_SHOWN)


def one_line(text: str, limit: int = 400) -> str:
    """A message as one clean line: line breaks become spaces, and an over-long text is cut visibly.

    It is cut in the middle, because the fault is named behind a name that may be long.
    """
    line = clean(" ".join(text.split()))
    if len(line) <= limit:
        return line
    tail = limit // 3
    return f"{line[: limit - tail - 5]} ... {line[len(line) - tail :]}"


def exactly(share: float) -> str:
    """A share in per cent, not rounded, because 99.9 % confidence must not be printed as 100 %."""
    return f"{100 * share:.10g}"


def plural(number: int, noun: str, many: str | None = None) -> str:
    """A number with its noun: 1 prompt, 2 prompts. many: the plural, for a noun that takes no s."""
    return f"{number} {noun}" if number == 1 else f"{number} {many or noun + 's'}"


def indices(word: str, numbers: list[int]) -> str:
    """Numbered things, runs joined: 'block 3' or 'blocks 0-4, 7'."""
    return f"{word if len(set(numbers)) == 1 else word + 's'} {', '.join(spans(numbers))}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Runs of numbers: '0-4', '7'."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def in_one(texts: Sequence[str]) -> str | None:
    """One text for several that differ in one measured number only; it gives the smallest and the largest: 'leaves
    1.0e-01 to 1.4e-01'. None where they differ in more."""
    parts = [_MEASURED.split(text) for text in texts]
    if len({len(split) for split in parts}) > 1:
        return None
    columns = list(zip(*parts, strict=True))  # the measured numbers are at odd places
    differing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if len(differing) > 1 or any(place % 2 == 0 for place in differing):
        return None
    words = [column[0] for column in columns]
    for place in differing:
        words[place] = f"{min(columns[place], key=float)} to {max(columns[place], key=float)}"
    return "".join(words)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def about(seconds: float) -> str:
    """A duration to about one digit: 'about 4 min'."""
    if seconds < 55:
        return f"about {max(1, round(seconds, -1 if seconds >= 20 else 0)):.0f} s"
    if seconds < 55 * 60:
        minutes = seconds / 60
        return f"about {round(minutes / 5) * 5 if minutes >= 20 else max(1, round(minutes))} min"
    hours = seconds / 3600
    return f"about {hours:.0f} h" if hours >= 10 else f"about {round(2 * hours) / 2:g} h"


def apart(value: float, *others: float) -> str:
    """The value with four digits, or with as many more as are needed to print it unlike any other that it does not
    equal."""
    for digits in range(4, 18):
        text = f"{value:.{digits}g}"
        if all(other == value or f"{other:.{digits}g}" != text for other in others):
            break
    return text


def natural(key: str) -> list[tuple[int, int, str]]:
    """A key to sort names by: block 2 before block 10."""
    parts = re.split(r"(\d{1,9})", key)
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in parts if p]

"""Packed JSON of the reports, embedded once in their page, from which the script draws maps and saves the reports."""

from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from duat_cli.report.tables import numbers

MOST_BYTES = 5_000_000  # of the JSON of all reports together, without maps; packed it takes about half
MOST_MAPS = 3_000_000  # of all maps, which the script draws: with pictures and tables a page stays below 5 MB
MARK = "\x01"  # stands for a number; in JSON strings this control character is written \u0001, so it is unique
_DIGITS = 12  # from so many characters on, a number takes less room as a double than as text
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)')


@dataclass(frozen=True)
class Packed:
    """Packed JSON. text: base64 of deflated bytes, first the doubles, then the text of the JSON."""

    text: str
    doubles: int
    """How many of the JSON's numbers are kept as doubles."""


def packed(value: object) -> Packed:
    """JSON packed into about half of its bytes. Numbers with many digits are kept as doubles instead of text: all first
    bytes, then all second bytes and so on, since the bytes with exponents are similar and compress well."""
    doubles = array("d")

    def kept(found: re.Match[str]) -> str:
        number = found[1]
        if number is None or len(number) < _DIGITS or number.lstrip("-").isdecimal():
            return found[0]
        doubles.append(float(number))
        return MARK

    text = _TOKENS.sub(kept, json.dumps(value, allow_nan=False, separators=(",", ":")))
    if sys.byteorder == "big":
        doubles.byteswap()
    single = doubles.tobytes()
    content = b"".join(single[byte::8] for byte in range(8)) + text.encode("ascii")
    return Packed(base64.b64encode(zlib.compress(content, 9)).decode("ascii"), len(doubles))


def embedded(document: dict[str, Any], share: float) -> tuple[dict[str, Any], list[str]]:
    """The report as embedded in its page, and descriptions of what was left out. share: its share of the room."""
    maps = document.get("maps") or []
    rest, left_out = cut_to({**document, "maps": []} if maps else document, int(share * MOST_BYTES))
    if not maps:
        return rest, left_out
    kept = _leading(maps, int(share * MOST_MAPS))
    if len(kept) < len(maps):
        left_out.append(f"maps of prompt {len(kept)} and further ones ({numbers.size(_size(maps[len(kept) :]))})")
    return {**rest, "maps": kept}, left_out


def _leading(maps: list[Any], limit: int) -> list[Any]:
    """The first maps, as many as fit."""
    kept, used = [], 2
    for one in maps:
        used += _size(one) + 1
        if used > limit:
            break
        kept.append(one)
    return kept


def cut_to(document: dict[str, Any], limit: int) -> tuple[dict[str, Any], list[str]]:
    """The document cut to `limit` bytes by emptying lists, and descriptions of what was left out.

    Of all lists, by path, the smallest whose removal makes the document fit is emptied; if there is none, the largest
    of the most deeply nested lists, and so on. document: a report as JSON; it is not changed.
    """
    size = _size(document)
    if size <= limit:
        return document, []
    found: list[str] = []
    document = json.loads(json.dumps(document))
    while (size := _size(document)) > limit:
        lists = list(_lists(document, ""))
        sizes: dict[str, int] = {}
        for path, _, _, value in lists:
            sizes[path] = sizes.get(path, 0) + _size(value)
        if not sizes:
            break
        enough = {path: bytes for path, bytes in sizes.items() if size - bytes <= limit}
        chosen = min(enough, key=lambda p: enough[p]) if enough else max(sizes, key=lambda p: (p.count("[]"), sizes[p]))
        found.append(f"{chosen} ({numbers.size(sizes[chosen])})")
        for path, owner, key, _ in lists:
            if path == chosen:
                owner[key] = []
    return document, found


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _lists(value: dict[str, Any] | list[Any], path: str) -> Iterator[tuple[str, dict[str, Any], str, list[Any]]]:
    """(path, owner, key in the owner, list) of every list that is a value of an object and not empty. A path is such as
    'blocks[].prompts'."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict | list):
                here = f"{path}.{key}".lstrip(".")
                if isinstance(inner, list) and inner:
                    yield here, value, key, inner
                yield from _lists(inner, here)
    else:
        for inner in value:
            if isinstance(inner, dict | list):
                yield from _lists(inner, f"{path}[]")

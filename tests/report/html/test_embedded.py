"""The JSON inside a page: it cannot leave its element, and what does not fit is named."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unpacking import reports_in

from duat_cli.report.html.embedded import MOST_BYTES, MOST_MAPS, cut_to, embedded, packed

documents = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(documents)
def test_what_is_packed_is_read_back(document: Any) -> None:
    """Value by value, the sign of a zero as well; and in characters that cannot end a script."""
    found = packed(document)
    element = f'<script type="application/zlib" id="reports" data-doubles="{found.doubles}">{found.text}</script>'
    assert json.dumps(reports_in(element)) == json.dumps(document)
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", found.text)


def test_numbers_of_many_digits_take_half_the_room() -> None:
    values = [math.sin(i) for i in range(1000)]
    found = packed({"values": values, "short": [0.25, 1, -7e-5], "text": "0.1234567890123456 \\" + '"'})
    assert found.doubles == sum(len(repr(value)) >= 12 for value in values)
    assert len(found.text) < 0.55 * len(json.dumps(values, separators=(",", ":")))


def sized(document: Any) -> int:
    return len(json.dumps(document, separators=(",", ":")))


def report() -> dict[str, Any]:
    rows = [{"index": i, "value": 0.125, "prompts": [{"x": [0.5] * 40}] * 6} for i in range(5)]
    return {"command": "inspect", "blocks": rows, "maps": [{"rows": [1] * 300}], "warnings": ["w"]}


def test_what_fits_is_whole() -> None:
    assert cut_to(report(), sized(report())) == (report(), [])


def test_the_smallest_list_that_suffices_goes() -> None:
    document = report()
    cut, missing = cut_to(document, sized(document) - 500)
    assert cut == {**report(), "maps": [{"rows": []}]}
    assert missing == ["maps[].rows (601 B)"]
    assert document == report()


@pytest.mark.parametrize("limit", [3000, 1500, 400, 150])
def test_a_document_is_made_to_fit(limit: int) -> None:
    cut, missing = cut_to(report(), limit)
    assert sized(cut) <= limit
    assert missing
    assert cut["command"] == "inspect"
    if limit >= 400:
        assert [row["value"] for row in cut["blocks"]] == [0.125] * 5  # deep lists go first


def test_of_maps_the_leading_ones_are_kept() -> None:
    one = {"tokens": ["a"], "rows": [0.5] * (MOST_MAPS // 12)}  # four bytes a number: a third of the room
    document = {"command": "inspect", "maps": [one] * 4, "big": ["x" * MOST_BYTES]}
    cut, missing = embedded(document, 1.0)
    assert cut == {"command": "inspect", "maps": [one] * 2, "big": []}
    assert len(missing) == 2
    assert missing[1].startswith("maps of prompt 2 and further ones")
    assert embedded({"command": "x"}, 0.5) == ({"command": "x"}, [])

"""How large pages become: 80 blocks x 15 prompts, with numbers that do not compress."""

from __future__ import annotations

import pytest
from large import BLOCKS, SOURCES, large
from unpacking import reports_in

from duat_cli.api.words import page_of

MOST = 5_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_page_of_80_blocks_and_15_prompts_is_below_5_mb(name: str) -> None:
    """Its JSON is whole, or the page names what it lacks."""
    report = large(name)
    page = page_of([(None, report)])
    (held,) = reports_in(page)
    assert len(page.encode()) <= MOST
    assert (held["report"] == report.model_dump(mode="json")) == (not held["left_out"])
    assert ("Too large for a page" in page) == bool(held["left_out"])
    for path in held["left_out"]:
        assert path.split(" (")[0] in page


def test_large_reports_side_by_side_share_the_room() -> None:
    report = large("inspect")
    page = page_of([("a.json", report), ("b.json", report)])
    assert len(page.encode()) <= MOST
    assert all(len(held["report"]["blocks"]) == BLOCKS for held in reports_in(page))
    assert "A: " in page
    assert "maps of prompt" in page

"""The table of what heads read: which heads of many, beside which null, and what is said of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sample_reports as sample

from duat_cli.report.tables.heads import head_tables
from duat_cli.report.tables.page import Page
from duat_cli.results.heads import Heads
from duat_cli.results.inspect import InspectReport


def report_of(*heads: Heads | None, exact: bool = True) -> InspectReport:
    report = sample.inspect_report(exact=exact)
    blocks = [block.model_copy(update={"heads": one}) for block, one in zip(report.blocks, heads, strict=False)]
    return report.model_copy(update={"blocks": blocks})


def text_of(*heads: Heads | None, exact: bool = True, width: int = 200) -> str:
    page = Page(width)
    return page.render(*head_tables(report_of(*heads, exact=exact), page))


def rows_of(text: str) -> list[str]:
    """The first column."""
    return [line.split("  ")[0] for line in text.splitlines() if re.match(r"(\d+\.\d+|null( \d)?)  ", line)]


def changed(heads: Heads, head: int, **values: Any) -> Heads:
    each = [one.model_copy(update=values) if one.index == head else one for one in heads.each or ()]
    return heads.model_copy(update={"each": each})


def test_without_the_option_there_is_nothing() -> None:
    assert head_tables(report_of(None, None), Page(80)) == []


def test_of_few_heads_all_are_shown() -> None:
    text = text_of(sample.heads(0), sample.heads(3))
    assert rows_of(text) == [*(f"{block}.{head}" for block in range(2) for head in range(9)), "null"]
    assert "in the JSON" not in text


def test_of_many_the_leading_ones_of_every_share() -> None:
    text = text_of(*map(sample.heads, (0, 3, 0)))
    assert "of 27 heads: by each share the 4 farthest above the null; the others are in the JSON." in text
    shown = rows_of(text)
    assert len(shown) == 21
    assert "0.8" not in shown  # below uniform attention in every share
    assert {"0.4", "2.4", "1.1", "1.6"} <= set(shown)  # the four of induction


def test_what_is_far_above_uniform_attention_stands_with_it() -> None:
    text = text_of(sample.heads(0))
    assert "induction: 0.4 86.0 % (uniform 12.5 %)" in text
    assert "first token: 0.0 90.0 % (uniform 12.5 %), 0.5 85.0 % (uniform 12.5 %)" in text
    near = text_of(changed(sample.heads(0), 4, induction_share=0.37))
    assert "induction: 0.4" not in near
    assert "far above" not in text_of(sample.heads(0), exact=False)


def test_blocks_whose_rows_see_other_tokens_have_nulls_of_their_own() -> None:
    local = sample.heads(0)
    assert local.uniform is not None
    local = local.model_copy(update={"uniform": local.uniform.model_copy(update={"effective_context": 3.0})})
    text = text_of(sample.heads(0), local, sample.heads(3))
    assert rows_of(text)[-2:] == ["null 1", "null 2"]
    assert "null 1: blocks 0, 2; null 2: block 1. What rows may see differs between them." in text


def test_what_has_no_value_says_why() -> None:
    text = text_of(sample.heads(0), sample.heads(1), sample.heads(2))
    assert "it calls attention 2 times; heads are read of one call (block 2)" in text
    assert "Rows of H sum to 0 to 1.00" in " ".join(text.split())
    zero = text_of(sample.heads(1))
    assert "0.8: every row of its H is zero" in zero
    assert "What each head reads\n" in text_of(sample.heads(2))


@pytest.mark.parametrize(
    ("rows", "said"), [(14, "over 14 rows"), (1, "over 1 row"), (0, "over no rows"), (None, "over no rows")]
)
def test_how_many_rows_have_a_repeated_token(rows: int | None, said: str) -> None:
    heads = sample.heads(0).model_copy(update={"duplicate_rows": rows})
    assert f"equal tokens in front, {said} with one" in text_of(heads)

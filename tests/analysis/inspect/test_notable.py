"""The summary of an inspect report: what it says of own terms, and that statistics count by their difference only."""

from __future__ import annotations

import sample_reports as sample

from duat_cli.analysis.inspect.notable import summarise
from duat_cli.results.inspect import Block
from duat_cli.results.operator import Nulls


def said(*blocks: Block) -> list[str]:
    return summarise(blocks, sample.certificate(), 9).notable


def block(index: int, **fields: float) -> Block:
    """A block whose statistics are those of its null, but for `fields`."""
    null = sample.null_stats(index, uniform=False)
    made = sample.block(index if index < 2 else 3)
    operator = made.operator.model_copy(update={"effective_heads": fields.get("heads", null.operator.effective_heads)})
    coupling = null.coupling.model_copy(
        update={k: fields[k] for k in ("effective_context", "first_token_share") if k in fields}
    )
    nulls = Nulls(uniform=sample.null_stats(index, uniform=True), reinitialised=null)
    return made.model_copy(update={"index": index, "operator": operator, "coupling": coupling, "null": nulls})


def test_values_that_equal_their_nulls_are_not_mentioned() -> None:
    sentences = said(block(0), block(1))
    assert len(sentences) == 1
    assert "own UAT term" in sentences[0]


def test_own_terms_are_named_by_their_blocks() -> None:
    """At a typical token: the share of all tokens together may be that of one with massive activations."""
    both = "block 0's own UAT term makes 34% of its output at a typical token, the most; block 1's 24%"
    assert said(block(0), block(1)) == [both]
    assert said(block(1)) == ["block 1's own UAT term makes 24% of its output at a typical token"]


def test_the_difference_is_from_the_nearer_null() -> None:
    found = said(block(0), block(1, heads=4.2))
    assert found[1] == "block 1's attention acts like 4.2 of its 9 heads, its null like 1.0"
    assert "block 0 reads 5.0 tokens in effect, its null 36.4" in said(block(0, effective_context=5.0), block(1))
    [_, sentence] = said(block(0, first_token_share=0.7), block(1))
    assert sentence.startswith("block 0 couples to the first token by 70% of a row's energy on average")
    assert sentence.endswith("its null by 4%")
    near = block(0, effective_context=5.0)
    coupling = near.null.uniform.coupling.model_copy(update={"effective_context": 20.0})
    nulls = near.null.model_copy(update={"uniform": near.null.uniform.model_copy(update={"coupling": coupling})})
    [_, sentence] = said(near.model_copy(update={"null": nulls}), block(1))
    assert sentence == "block 0 reads 5.0 tokens in effect, its null of uniform attention 20.0"


def test_a_value_between_its_nulls_differs_from_neither() -> None:
    assert len(said(block(0, heads=1.02))) == 1


def test_few_heads_that_the_nulls_have_as_well_are_no_news() -> None:
    """An untrained model's 1.0 effective heads and its context of half the tokens say nothing."""
    assert not any("heads" in s or "reads" in s for s in said(block(0), block(1), block(3)))


def test_without_nulls_only_own_terms_are_left() -> None:
    nothing = Nulls(uniform=None, reinitialised=None, reasons={"uniform": "no W'", "reinitialised": "no W'"})
    bare = block(0, heads=4.2, first_token_share=0.9).model_copy(update={"null": nothing})
    assert said(bare) == ["block 0's own UAT term makes 34% of its output at a typical token"]


def test_shares_of_everything_up_to_a_block_are_not_called_its_own() -> None:
    assert not any("made mostly" in s for s in said(*(block(i) for i in (0, 1, 3))))

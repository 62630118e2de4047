"""Which order a sketch gives: of whole parts by what was measured of each."""

from __future__ import annotations

import pytest
import torch

from duat_cli.analysis.prune.run import PruneOptions, prune_bound
from duat_cli.analysis.prune.sets.order import Group, Sizes
from duat_cli.analysis.prune.sets.path import Sketch, path_of
from duat_cli.analysis.prune.terms.damage import Divergence
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.loading.model.load import load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import default_prompts, encode
from duat_cli.models.terms.sites import TermId


def order(kind: Kind, responses: torch.Tensor, known: dict[int, float]) -> list[int]:
    count = responses.shape[1]
    terms = TermList([TermId(kind, k) for k in range(count)], {(kind, k): k for k in range(count)})
    sizes = Sizes(torch.ones(count, dtype=torch.float64), (count, count))
    group = Group((kind,), terms, sizes, PruneOptions())
    return path_of(group, Sketch(Divergence(None), [responses], known=known)).places.tolist()


def test_whole_parts_go_as_they_were_measured() -> None:
    responses = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    measured = {0: 9.0, 1: 0.3, 2: 0.2, 3: 0.4}
    assert order("ffn", responses, {}) == [0, 1, 2, 3]
    assert order("ffn", responses, measured) == [2, 1, 3, 0]
    assert order("ffn", responses, {0: 9.0}) == [0, 1, 2, 3]  # of some alone nothing can be said of the others


@pytest.mark.parametrize(("sign", "expected"), [(1.0, [0, 2, 1]), (-1.0, [0, 1, 2])])
def test_parts_that_do_the_same_do_not_go_together(sign: float, expected: list[int]) -> None:
    """The first two move the output alike, or against each other; the third at a right angle to them."""
    responses = torch.ones(64, 3)
    responses[:, 1], responses[1::2, 2] = sign, -1.0
    assert order("attention", responses, {0: 1.0, 1: 1.2, 2: 1.1}) == expected


@pytest.fixture(scope="module")
def attentions() -> list[tuple[int, float]]:
    """Of the demo, in the order in which they go, with what each does alone."""
    loaded = load(None)
    prompts = encode(load_tokenizer(loaded.files.path), default_prompts()[:2], 12, 512, 2**20)
    options = PruneOptions(kinds=("attention",), probes=8, measure=2, effort="quick")
    outcome = prune_bound(loaded, prompts, [], options, lambda *_: None)
    alone = {term.block: term.measured for term in outcome.report.terms}
    found = [(term.block, alone[term.block]) for term in outcome.nested["attention"].order]
    assert all(damage is not None for _, damage in found)
    return found  # type: ignore[return-value]


def test_the_first_attention_of_the_demo_goes_last(attentions: list[tuple[int, float]]) -> None:
    """It is predicted to do as little as the second least, and does far more than any other."""
    assert attentions[-1][0] == 0
    assert attentions[-1][1] > 5 * max(damage for _, damage in attentions[:-1])

"""Removals side by side in one pass against each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from removal import TYPES, prepared, untouched
from torch import Tensor, nn

from duat_cli.models.arrays import relative_error
from duat_cli.models.budgets import ROW_ELEMENTS, ROW_TOKENS
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.sweep.passes import record, removals, run_alone
from duat_cli.models.sweep.rows import NotInRowsError, in_waves, run_without, without_each
from duat_cli.models.terms.sites import TermId, find_sites


def forward_of(structure: Any, ids: Tensor, rows: int = 1) -> Any:
    given = ids.expand(rows, -1).contiguous()

    def forward() -> Tensor:
        return run_stack(structure.stack, given)[0]

    return forward


def each_row(structure: Any, ids: Tensor, gone: Any) -> tuple[Tensor, list[Tensor]]:
    """Side by side, and one after the other."""
    recorded = record(structure, forward_of(structure, ids))
    rows = run_alone(without_each(structure, forward_of(structure, ids, len(gone)), recorded.calls, gone))
    return rows, [run_without(structure, forward_of(structure, ids), recorded, one) for one in gone]


@pytest.mark.parametrize("model_type", [*TYPES, "mixtral", "t5"])
def test_each_row_is_the_pass_without_its_terms(model_type: str) -> None:
    model, structure, _ = prepared(model_type)
    sites, ids = find_sites(structure), token_ids(structure.stack, 6)
    wanted = [
        [TermId("ffn", 1, 0)],
        [TermId("head", 0, 1), TermId("head", 2, 0)],
        [TermId("block", 1)],
        [TermId("neuron", 0, 0), TermId("neuron", 1, 3), TermId("expert", 0, 1), TermId("expert", 1, 0)],
        [],
    ]

    def there(term: TermId) -> bool:
        return (term.index or 0) < sites[structure.calls[term.block]].count(term.kind)

    gone = [removals(structure, sites, filter(there, terms)) for terms in wanted]
    rows, alone = each_row(structure, ids, gone)
    for row, one in zip(rows, alone, strict=True):
        assert relative_error(row[None], one) <= 1e-5
    assert relative_error(rows[0], rows[2]) > 1e-3
    assert relative_error(rows[3], rows[4]) > 1e-4
    later = [removals(structure, sites, [term]) for term in (TermId("block", 2), TermId("ffn", 2, 0))]
    rows, alone = each_row(structure, ids, later)
    for row, one in zip(rows, alone, strict=True):
        assert relative_error(row[None], one) <= 1e-5
    assert relative_error(rows[0], rows[1]) > 1e-4
    assert untouched(model)


def test_means_stand_in_row_by_row() -> None:
    model = single_model("llama")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model, 6)
    generator = torch.Generator().manual_seed(1)
    means = {
        (number, site): torch.randn(1, generator=generator).double()
        for number, module in enumerate(structure.calls)
        for site in (*sites[module].sites, None)
    }
    gone = [removals(structure, sites, [term], means) for term in (TermId("head", 1, 0), TermId("block", 1))]
    rows, alone = each_row(structure, ids, gone)
    for row, one in zip(rows, alone, strict=True):
        assert relative_error(row[None], one) <= 1e-5


def test_a_block_that_all_rows_lack_does_not_run() -> None:
    model = single_model("llama")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model, 6)
    lacking = [removals(structure, sites, [TermId("block", 1), *more]) for more in ([], [TermId("ffn", 2, 0)])]
    ran: list[nn.Module] = []
    with hooked(list(structure.calls[1].children()), lambda module, _args, _kwargs: ran.append(module)):
        recorded = record(structure, forward_of(structure, ids))
        ran.clear()
        rows = run_alone(without_each(structure, forward_of(structure, ids, 2), recorded.calls, lacking))
        assert not ran
        run_alone(without_each(structure, forward_of(structure, ids, 3), recorded.calls, [*lacking, {}]))
        assert ran
    for row, one in zip(rows, lacking, strict=True):
        assert relative_error(row[None], record(structure, forward_of(structure, ids), gone=one).output) <= 1e-5
    assert relative_error(rows[0], rows[1]) > 1e-4


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    """An FFN that puts the tokens of all rows before the features' axis, in an order that is not known."""
    model = single_model("llama")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model, 6)
    gone = [removals(structure, sites, [TermId("ffn", 1, 0)])] * 2
    [site] = sites[structure.calls[1]].of("ffn")
    handle = site.watched.register_forward_hook(lambda _module, _args, output: output.reshape(1, -1, output.shape[-1]))
    recorded = record(structure, forward_of(structure, ids))
    one = without_each(structure, forward_of(structure, ids, 2), recorded.calls, gone)
    try:
        with pytest.raises(NotInRowsError, match="2 rows of 6 tokens, got a tensor of shape"):
            run_alone(one)
    finally:
        handle.remove()


def test_what_begins_near_each_other_goes_together() -> None:
    model = single_model("llama")
    structure = discover(model)
    sites = find_sites(structure)
    blocks = [2, 0, 1, 0, 2]
    gone = [removals(structure, sites, [TermId("block", k)]) for k in blocks]
    tokens = ROW_TOKENS // 2
    assert in_waves(gone, tokens, 1) == [[1, 3], [2, 0], [4]]
    assert in_waves(gone, tokens, ROW_ELEMENTS) == [[1], [3], [2], [0], [4]]
    assert in_waves(gone, 10 * ROW_TOKENS, 1) == [[1], [3], [2], [0], [4]]
    assert in_waves([], 5, 1) == []


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 22])
@pytest.mark.parametrize("count", [1, 2, 5, 23, 50])
def test_never_as_many_rows_as_tokens(tokens: int, count: int) -> None:
    waves = in_waves([{}] * count, tokens, 1)
    assert sorted(k for wave in waves for k in wave) == list(range(count))
    assert all(len(wave) != tokens or tokens == 1 for wave in waves)

"""Nested sets: how they are ordered, predicted and chosen, and that the guarantee is true as printed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from torch import Tensor

from duat_cli.analysis.prune.ablation import Ablator, measured
from duat_cli.analysis.prune.damage import Hidden, Loss
from duat_cli.analysis.prune.plans import (
    BEYOND,
    TESTED_SETS,
    Nested,
    Point,
    Trial,
    nested_sets,
    predicted_curve,
    try_alone,
)
from duat_cli.analysis.prune.responses import TermList, responses
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.statistics.binomial import NestedChoice, allowed, prompts_needed


class Fake:
    """An ablator whose damage is a number a prompt, the more the larger the set."""

    def __init__(self, damage: Any) -> None:
        self.damage_of, self.metric, self.runs = damage, Hidden(None), 0  # type: ignore[arg-type]

    def place(self, prompt: Prompt) -> int:
        return prompt.line

    def record(self, ids: int) -> None:
        return None

    def removals(self, terms: Any) -> int:
        return len(list(terms))

    def damage(self, recorded: None, ids: int, removals: int) -> float:
        self.runs += 1
        return self.damage_of(ids, removals)


def prompts(count: int) -> list[Prompt]:
    return [Prompt("", str(k), torch.zeros(1, 1, dtype=torch.long), k) for k in range(count)]


def guaranteed(
    fake: Fake, sets: Nested, held_out: list[Prompt], budget: float, share: float, confidence: float
) -> tuple[NestedChoice, list[int]]:
    trial = Trial(sets, len(held_out), budget, share, confidence)
    try_alone(fake, trial, held_out, lambda *_: None)  # type: ignore[arg-type]
    return trial.choice(), trial.sizes


def nested(size: int) -> Nested:
    return Nested("head", [TermId("head", 0, k) for k in range(size)], [], Point(size, 0.0, 0.0))


def terms_of(count: int) -> TermList:
    return TermList([TermId("head", 0, k) for k in range(count)], {("head", 0): 0})


# -- sets ----------------------------------------------------------------------------------------------------


def test_what_cancels_counts() -> None:
    """Two opposite terms do nothing together; the sum of their damages would say otherwise."""
    found = torch.tensor([[1.0, -1.0, 3.0], [2.0, -2.0, 0.0]])
    curve = predicted_curve(Hidden(None), [found], torch.tensor([0, 1, 2]))  # type: ignore[arg-type]
    assert curve.tolist() == pytest.approx([2.5**0.5, 0.0, 4.5**0.5])


def test_a_curve_is_the_mean_over_prompts() -> None:
    found = [torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [3.0]])]
    assert predicted_curve(Hidden(None), found, torch.tensor([0])).tolist() == [2.0]  # type: ignore[arg-type]


def test_the_least_damaging_go_first_and_the_chosen_set_is_within_the_budget() -> None:
    damage = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    fake = Fake(lambda prompt, removed: [0.0, 0.1, 0.3, 0.6, 1.0][removed])
    found = nested_sets(fake, terms_of(4), "head", damage, [damage[None].float()], prompts(2), 0.5, lambda *_: None)  # type: ignore[arg-type]
    assert [t.index for t in found.order] == [1, 3, 2, 0]
    assert found.chosen == Point(2, pytest.approx(0.3), pytest.approx(0.3))
    assert [p.removed for p in found.curve] == [1, 2, 3, 4]
    assert [p.predicted for p in found.curve] == pytest.approx([0.1, 0.3, 0.6, 1.0])


def test_a_set_is_chosen_only_if_every_smaller_one_fits() -> None:
    damage = torch.full((4,), 0.01, dtype=torch.float64)
    fake = Fake(lambda prompt, removed: [0.0, 0.1, 0.9, 0.1, 0.1][removed])
    found = nested_sets(fake, terms_of(4), "head", damage, [damage[None].float()], prompts(1), 0.5, lambda *_: None)  # type: ignore[arg-type]
    assert found.chosen is not None
    assert found.chosen.removed == 1


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_everything_may_go_where_nothing_does_damage(count: int) -> None:
    zero = torch.zeros(count, dtype=torch.float64)
    found = nested_sets(
        Fake(lambda *_: 0.0), terms_of(count), "head", zero, [zero[None].float()], prompts(2), 0.1, lambda *_: None
    )  # type: ignore[arg-type]
    assert found.chosen == Point(count, 0.0, 0.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_block_always_stays(count: int) -> None:
    """Where nothing does damage all blocks but the last may go; of a single block there is no set."""
    damage = torch.arange(count, dtype=torch.float64) / 1000
    blocks = TermList([TermId("block", k) for k in range(count)], {("block", k): k for k in range(count)})
    fake = Fake(lambda *_: 0.0)
    found = nested_sets(fake, blocks, "block", damage, [damage[None].float()], prompts(2), 0.5, lambda *_: None)  # type: ignore[arg-type]
    assert [t.block for t in found.order] == list(range(count))
    assert [p.removed for p in found.curve] == list(range(1, count))
    if count == 1:
        assert found.chosen is None
        return
    assert found.chosen is not None
    assert found.chosen.removed == count - 1
    choice, sizes = guaranteed(fake, found, prompts(40), 0.5, 0.1, 0.95)
    assert choice.chosen is not None
    assert sizes[choice.chosen] == count - 1


def test_nothing_may_go_where_everything_does_damage() -> None:
    ones = torch.ones(5, dtype=torch.float64)
    found = nested_sets(
        Fake(lambda *_: 1.0), terms_of(5), "head", ones, [ones[None].float()], prompts(2), 0.1, lambda *_: None
    )  # type: ignore[arg-type]
    assert found.chosen is None
    assert found.curve


def test_a_loss_may_fall() -> None:
    """nll: a negative damage is within every budget. The first response is the slope of the loss along the term."""
    damage = torch.tensor([-0.2, 0.05, 0.4], dtype=torch.float64)
    fake = Fake(lambda prompt, removed: [0.0, -0.2, -0.1, 0.9][removed])
    fake.metric = Loss(None)  # type: ignore[assignment]
    found = nested_sets(
        fake, terms_of(3), "head", damage, [torch.tensor([[0.2, -0.05, -0.4], [0.0, 0.0, 0.0]])], prompts(1), 0.1,
        lambda *_: None,
    )  # type: ignore[arg-type]  # fmt: skip
    assert [t.index for t in found.order] == [0, 1, 2]
    assert [p.predicted for p in found.curve] == pytest.approx([-0.2, -0.15, 0.25])
    assert found.chosen is not None
    assert found.chosen.removed == 2


def test_the_curve_ends_a_little_beyond_the_budget() -> None:
    damage = torch.full((1000,), 0.01, dtype=torch.float64)
    one = torch.full((1, 1000), 0.01)
    found = nested_sets(
        Fake(lambda prompt, m: 0.01 * m), terms_of(1000), "head", damage, [one], prompts(1), 0.1, lambda *_: None
    )  # type: ignore[arg-type]
    assert found.curve[-1].predicted == pytest.approx(BEYOND * 0.1, rel=0.1)
    assert len(found.curve) <= 12
    assert found.chosen is not None
    assert 9 <= found.chosen.removed <= 10


@functools.cache
def prepared() -> tuple[Any, Any, Any]:
    model = single_model("llama")
    structure = discover(model)
    return model, structure, find_sites(structure)


def test_on_a_model_a_point_of_the_curve_is_the_ablation_of_its_set() -> None:
    _, structure, sites = prepared()
    metric = Hidden(structure)
    ablator = Ablator(structure, sites, metric)
    terms = TermList.of(structure, sites, ("neuron",))
    given = [Prompt("", str(k), token_ids(structure.stack, 6, k), k) for k in range(2)]
    found: list[Tensor] = [
        responses(structure, sites, metric, p.input_ids, ablator.record(p.input_ids), terms, 32, k)
        for k, p in enumerate(given)
    ]
    damage = metric.predicted(torch.stack(found), 0.95)[0]
    plan = nested_sets(ablator, terms, "neuron", damage, found, given, 0.3, lambda *_: None)
    assert plan.chosen is not None
    assert 1 < plan.chosen.removed < len(terms.ids)
    sets = [plan.order[: p.removed] for p in plan.curve]
    again = measured(ablator, given, sets, lambda *_: None).mean(dim=1).tolist()
    assert [p.measured for p in plan.curve] == pytest.approx(again)
    small = [p for p in plan.curve if p.measured < 0.1]
    assert small
    assert all(p.predicted == pytest.approx(p.measured, rel=0.35) for p in small)


# -- the guarantee -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "confidence"), [(0.1, 0.95), (0.2, 0.8), (0.3, 0.9)])
def test_the_statement_fails_no_more_often_than_it_says(share: float, confidence: float) -> None:
    """Prompts drawn anew from a population in which the true share above the budget is known for every set."""
    truth = {1: 0.3 * share, 2: 0.8 * share, 3: 1.02 * share, 4: 1.3 * share}  # the larger the set, the more exceed
    generator = torch.Generator().manual_seed(11)
    rounds, wrong, given = 600, 0, 0
    for _ in range(rounds):
        drawn = torch.rand(60, generator=generator).tolist()
        fake = Fake(lambda prompt, removed, drawn=drawn: float(drawn[prompt] < truth[removed]))
        choice, sizes = guaranteed(fake, nested(4), prompts(60), 0.5, share, confidence)
        if choice.chosen is not None:
            given += 1
            wrong += truth[sizes[choice.chosen]] > share
    assert given > 0.3 * rounds
    assert wrong / rounds <= (1 - confidence) + 3 * ((1 - confidence) * confidence / rounds) ** 0.5
    assert wrong > 0  # the level is used, not undercut by far


def test_the_counts_are_those_of_the_set_that_is_named() -> None:
    exceeded = {5: 1, 10: 2, 15: 4, 20: 30}
    fake = Fake(lambda prompt, removed: 1.0 if prompt < exceeded[removed] else 0.0)
    choice, sizes = guaranteed(fake, nested(20), prompts(100), 0.5, 0.1, 0.95)
    assert sizes == [5, 10, 15, 20]
    assert allowed(100, 0.1, 0.95) == 4
    assert choice.chosen == 2
    assert choice.exceeded[choice.chosen] == 4
    assert choice.prompts == 100


def test_a_set_that_has_failed_and_all_larger_ones_are_run_no_more() -> None:
    fake = Fake(lambda prompt, removed: 1.0 if removed > 5 else 0.0)
    choice, _ = guaranteed(fake, nested(20), prompts(100), 0.5, 0.1, 0.95)
    assert choice.chosen == 0
    assert fake.runs < 100 * TESTED_SETS * 0.6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sets_of_few_terms(size: int) -> None:
    choice, sizes = guaranteed(Fake(lambda *_: 0.0), nested(size), prompts(40), 0.5, 0.1, 0.95)
    assert sizes == list(range(1, size + 1))
    assert choice.chosen == size - 1


def test_too_few_prompts_are_refused() -> None:
    needed = prompts_needed(0.1, 0.95)
    assert needed == 29  # 0.9^29 < 0.05 < 0.9^28
    with pytest.raises(InputError, match="29"):
        guaranteed(Fake(lambda *_: 0.0), nested(2), prompts(28), 0.5, 0.1, 0.95)

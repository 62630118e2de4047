"""Nested sets: how they are ordered, predicted and chosen."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import single_model, token_ids
from pruning import Fake, prompts
from torch import Tensor

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.sets.nested import BEYOND, Nested, Point, measured_sets, nested_of
from duat_cli.analysis.prune.sets.order import Group, Sizes
from duat_cli.analysis.prune.sets.path import Sketch, path_of
from duat_cli.analysis.prune.sets.trial import Trial, try_alone
from duat_cli.analysis.prune.terms.ablation import Ablator, Effect, effects_of
from duat_cli.analysis.prune.terms.damage import Divergence, Hidden, Loss
from duat_cli.analysis.prune.terms.responses import Responses, TermList
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId, find_sites


def found_of(
    fake: Any,
    terms: TermList,
    kind: Any,
    responses: list[Tensor],
    given: list[Prompt],
    budget: float,
    *,
    uniform: bool = False,
    remove: float | None = None,
) -> Nested:
    """The nested sets of one kind or several, each term holding one parameter. remove: share of them."""
    kinds = (kind,) if isinstance(kind, str) else kind
    count = len(terms.ids)
    blocks = 1 + max(term.block for term in terms.ids)
    sizes = Sizes(torch.ones(count, dtype=torch.float64), (count, count), (1,) * blocks)
    group = Group(kinds, terms, sizes, PruneOptions(budget=budget, uniform=uniform, remove=remove))
    wanted = nested_of(group, path_of(group, Sketch(fake.metric, responses)))
    effects = effects_of(fake, given, wanted.sets, lambda *_: None)
    return measured_sets([wanted], effects, budget)[wanted.name]


def curve_of(metric: Any, responses: list[Tensor], order: Tensor) -> Tensor:
    return Sketch(metric, responses).curve(order)


def terms_of(count: int) -> TermList:
    return TermList([TermId("head", 0, k) for k in range(count)], {("head", 0): 0})


# -- sets ----------------------------------------------------------------------------------------------------


def test_what_cancels_counts() -> None:
    """Two opposite terms do nothing together; the sum of their damages would say otherwise."""
    found = torch.tensor([[1.0, -1.0, 3.0], [2.0, -2.0, 0.0]])
    curve = curve_of(Hidden(None), [found], torch.tensor([0, 1, 2]))  # type: ignore[arg-type]
    assert curve.tolist() == pytest.approx([2.5**0.5, 0.0, 4.5**0.5])


def test_a_curve_is_the_mean_over_prompts() -> None:
    found = [torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [3.0]])]
    assert curve_of(Hidden(None), found, torch.tensor([0])).tolist() == [2.0]  # type: ignore[arg-type]


def test_the_least_damaging_go_first_and_the_chosen_set_is_within_the_budget() -> None:
    damage = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    fake = Fake(lambda prompt, removed: [0.0, 0.1, 0.3, 0.6, 1.0][removed])
    found = found_of(fake, terms_of(4), "head", [damage[None].float()], prompts(2), 0.5)
    assert [t.index for t in found.order] == [1, 3, 2, 0]
    assert found.chosen == Point(2, pytest.approx(0.3), pytest.approx(0.3), pytest.approx((0.15, 0.15)))
    assert [p.removed for p in found.curve] == [1, 2, 3, 4]
    assert [p.predicted for p in found.curve] == pytest.approx([0.1, 0.3, 0.6, 1.0])


def test_a_set_is_chosen_only_if_every_smaller_one_fits() -> None:
    damage = torch.full((4,), 0.01, dtype=torch.float64)
    fake = Fake(lambda prompt, removed: [0.0, 0.1, 0.9, 0.1, 0.1][removed])
    found = found_of(fake, terms_of(4), "head", [damage[None].float()], prompts(1), 0.5)
    assert found.chosen is not None
    assert found.chosen.removed == 1


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_everything_may_go_where_nothing_does_damage(count: int) -> None:
    zero = torch.zeros(count, dtype=torch.float64)
    found = found_of(Fake(lambda *_: 0.0), terms_of(count), "head", [zero[None].float()], prompts(2), 0.1)
    assert found.chosen == Point(count, 0.0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_block_always_stays(count: int) -> None:
    """Where nothing does damage all blocks but the last may go; of a single block there is no set."""
    damage = torch.arange(count, dtype=torch.float64) / 1000
    blocks = TermList([TermId("block", k) for k in range(count)], {("block", k): k for k in range(count)})
    fake = Fake(lambda *_: 0.0)
    found = found_of(fake, blocks, "block", [damage[None].float()], prompts(2), 0.5)
    assert [t.block for t in found.order] == list(range(count))
    assert [p.removed for p in found.curve] == list(range(1, count))
    if count == 1:
        assert found.chosen is None
        return
    assert found.chosen is not None
    assert found.chosen.removed == count - 1
    trial = Trial(found, 40, PruneOptions(budget=0.5))
    try_alone(fake, [trial], prompts(40), lambda *_: None)  # type: ignore[arg-type]
    choice = trial.choice()
    assert choice is not None
    assert trial.sizes[choice] == count - 1


def test_nothing_may_go_where_everything_does_damage() -> None:
    ones = torch.ones(5, dtype=torch.float64)
    found = found_of(Fake(lambda *_: 1.0), terms_of(5), "head", [ones[None].float()], prompts(2), 0.1)
    assert found.chosen is None
    assert found.curve


def test_a_loss_may_fall() -> None:
    """nll: a negative damage is within every budget. The first response is the slope of the loss along the term."""
    fake = Fake(lambda prompt, removed: [0.0, -0.2, -0.1, 0.9][removed])
    fake.metric = Loss(None)  # type: ignore[assignment]
    found = found_of(fake, terms_of(3), "head", [torch.tensor([[0.2, -0.05, -0.4], [0.0, 0.0, 0.0]])], prompts(1), 0.1)
    assert [t.index for t in found.order] == [0, 1, 2]
    assert [p.predicted for p in found.curve] == pytest.approx([-0.2, -0.15, 0.25])
    assert found.chosen is not None
    assert found.chosen.removed == 2


def test_the_curve_ends_a_little_beyond_the_budget() -> None:
    one = torch.full((1, 1000), 0.01)
    found = found_of(Fake(lambda prompt, m: 0.01 * m), terms_of(1000), "head", [one], prompts(1), 0.1)
    assert found.curve[-1].predicted == pytest.approx(BEYOND * 0.1, rel=0.1)
    assert len(found.curve) <= 12
    assert found.chosen is not None
    assert 9 <= found.chosen.removed <= 10


def drawn(moves: Tensor, probes: int) -> list[Tensor]:
    """Responses under two prompts of terms that move the output so, (terms, width)."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(probes, moves.shape[1], generator=generator) @ moves.T for _ in range(2)]


def test_what_adds_up_goes_apart_and_what_cancels_is_not_gone_by() -> None:
    """Terms 0 and 1 move the output alike, 2 moves it at a right angle and 3 against them."""
    moves = torch.tensor([[1.0, 0], [1.05, 0], [0, 1.2], [-1.6, 0]])
    found = found_of(Fake(lambda *_: 9.0), terms_of(4), "head", drawn(moves, 300), prompts(2), 0.1, remove=0.99)
    assert [term.index for term in found.order] == [0, 2, 3, 1]  # 1 would do 1.1 + 2.1; 3 does 2.6 by itself


@pytest.mark.parametrize("kinds", [("head",), ("neuron", "head")])
def test_the_order_is_that_of_a_naive_choice_of_one_term_after_the_other(kinds: tuple[Any, ...]) -> None:
    """Fewer terms than steps: each goes by itself. Prompts and probes are samples of one estimate."""
    count, probes = 24, 16
    moves = torch.randn(count, 6, generator=torch.Generator().manual_seed(1)) + 0.5
    ids = [TermId(kinds[k * len(kinds) // count], 0, k) for k in range(count)]
    terms = TermList(ids, {(kind, 0): 0 for kind in kinds})
    responses = drawn(moves, probes)
    fake = Fake(lambda *_: 9.0)
    fake.metric = Divergence(None)  # type: ignore[assignment]
    found = found_of(fake, terms, kinds, responses, prompts(2), 0.1, remove=0.99)
    samples = torch.cat(responses).double().numpy()
    left, order = list(range(count)), list[int]()
    while left:
        products = samples[:, order].sum(axis=1)[:, None] * samples
        error = products.std(axis=0) / len(samples) ** 0.5
        alike = 2 * np.clip(products.mean(axis=0) - error, 0, None)
        worth = (samples**2).mean(axis=0) + alike
        order.append(min(left, key=lambda k: worth[k]))
        left.remove(order[-1])
    assert [found.order.index(ids[k]) for k in order] == list(range(count))
    alone = found_of(fake, terms, kinds, responses, prompts(2), 0.1).order  # where a budget decides
    assert [alone.index(ids[k]) for k in (samples**2).mean(axis=0).argsort()] == list(range(count))
    assert alone != found.order


@pytest.mark.parametrize("widths", [(4, 4, 4), (5, 3, 4)])
def test_uniform_sets_take_as_many_neurons_of_every_block_and_leave_one(widths: tuple[int, ...]) -> None:
    ids = [TermId("neuron", block, n) for block, width in enumerate(widths) for n in range(width)]
    terms = TermList(ids, {("neuron", 0): 0})
    generator = torch.Generator().manual_seed(2)
    damage = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    found = found_of(Fake(lambda *_: 0.0), terms, "neuron", [damage[None].float()], prompts(2), 9.0, uniform=True)
    assert sorted(found.order) == sorted(ids)
    assert (found.uniform, found.chosen) == (True, found.curve[-1])
    assert found.curve[-1].removed == 3 * (min(widths) - 1)
    for point in found.curve:
        gone = found.order[: point.removed]
        for block in range(3):
            mine = sorted(ids.index(term) for term in gone if term.block == block)
            here = [k for k, term in enumerate(ids) if term.block == block]
            least = sorted(here, key=lambda k: float(damage[k]))[: point.removed // 3]
            assert mine == sorted(least)
    trial = Trial(found, 40, PruneOptions(budget=0.5))
    assert trial.sizes[-1] == found.curve[-1].removed
    assert all(size % 3 == 0 for size in trial.sizes)


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
        Responses(structure, sites, metric, p.input_ids, ablator.record(p.input_ids), terms, 32, k).alone()
        for k, p in enumerate(given)
    ]
    plan = found_of(ablator, terms, "neuron", found, given, 0.3)
    assert plan.chosen is not None
    assert 1 < plan.chosen.removed < len(terms.ids)
    sets = [plan.order[: p.removed] for p in plan.curve]
    again = effects_of(ablator, given, sets, lambda *_: None)
    for place, point in enumerate(plan.curve):
        under = [row[place] for row in again]
        assert point.measured == pytest.approx(statistics.fmean(one.damage for one in under))
        assert point.moved == pytest.approx(tuple(one.moved for one in under))
    small = [p for p in plan.curve if p.measured is not None and p.measured < 0.1]
    assert small
    assert all(p.predicted == pytest.approx(p.measured, rel=0.35) for p in small)


def test_one_set_of_several_kinds_is_ordered_by_damage_a_parameter() -> None:
    """A head does three times what a neuron does and holds ten times as much: it goes first."""
    terms = TermList(
        [TermId("neuron", 0, 0), TermId("neuron", 0, 1), TermId("head", 0, 0), TermId("head", 0, 1)],
        {("neuron", 0): 0, ("head", 0): 2},
    )
    damage = torch.tensor([1.0, 2.0, 3.0, 30.0])
    held = torch.tensor([1.0, 1.0, 10.0, 10.0], dtype=torch.float64)
    group = Group(("neuron", "head"), terms, Sizes(held, (22.0, 44.0), (1,)), PruneOptions(budget=1e-9))
    path = path_of(group, Sketch(Hidden(None), [damage[None]]))  # type: ignore[arg-type]
    assert [terms.ids[k].kind for k in path.places.tolist()] == ["head", "neuron", "neuron", "head"]
    assert path.curve.tolist() == pytest.approx([3.0, 4.0, 6.0, 36.0])
    for wanted, removed in ((10.0, 1), (10.5, 2), (12.1, 4), (21.9, 4)):
        asked = PruneOptions(budget=1e-9, remove=wanted / 22)
        found = nested_of(replace(group, options=asked), path)
        assert found.curve[-1].removed == found.wanted == removed
        assert found.likely(1e-9, 4) == [removed]
        effects = [[Effect(damage, damage / 10)] * len(found.curve) for damage in (4.0, 6.0)]
        assert found.measured(effects, 1e-9).chosen == Point(removed, found.curve[-1].predicted, 5.0, (0.4, 0.6))


@pytest.mark.parametrize(
    ("budget", "likely"),
    [(0.35, [3, 2, 4, 1]), (0.05, [1, 2, 3, 4]), (9.0, [6, 5, 4, 3])],
    ids=["in between", "none", "all"],
)
def test_the_sets_that_are_likely_lie_about_the_predicted_one(budget: float, likely: list[int]) -> None:
    """Where the prediction is not monotone, about the end of what it puts within the budget at a stretch."""
    order = [TermId("head", 0, k) for k in range(6)]
    curve = [Point(size, predicted) for size, predicted in enumerate([0.1, 0.2, 0.3, 0.4, 0.3, 0.6], 1)]
    found = Nested(("head",), order, curve)
    assert found.likely(budget, 4) == likely
    assert found.likely(budget, 1) == likely[:1]
    assert Nested(("head",), order, []).likely(budget, 4) == []


def test_lengths_are_compared_by_their_squares() -> None:
    """A head moves the output by 3, each of four neurons by 1, all at right angles; they hold the same in all. Without
    the head the output is off by 3, without the neurons by 2, though a parameter of the head does 3 / 4 and a neuron
    1."""
    terms = TermList([TermId("head", 0, 0)] + [TermId("neuron", 0, k) for k in range(4)], {})
    terms.starts.update({("head", 0): 0, ("neuron", 0): 1})
    responses = torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0])) * 5**0.5  # the mean over five probes is of squares
    sizes = Sizes(torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64), (8.0, 8.0), (1,))
    group = Group(("head", "neuron"), terms, sizes, PruneOptions())
    path = path_of(group, Sketch(Hidden(None), [responses]))  # type: ignore[arg-type]
    assert path.places.tolist() == [1, 2, 3, 4, 0]
    assert float(path.curve[3]) == pytest.approx(2.0)
    assert float(path.curve[4]) == pytest.approx(13**0.5)


def test_uniform_sets_take_whole_key_and_value_heads_of_every_block() -> None:
    """Two blocks of six heads that share two key and value heads: one of them may go, the less damaging one."""
    ids = [TermId("head", b, k) for b in range(2) for k in range(6)] + [
        TermId("neuron", b, n) for b in range(2) for n in range(3)
    ]
    terms = TermList(ids, {("head", 0): 0, ("neuron", 0): 12})
    damage = torch.tensor([9.0, 9, 9, 1, 1, 8, 2, 2, 2, 3, 3, 3, 1, 50, 2, 60, 3, 4])
    held = torch.ones(18, dtype=torch.float64)
    responses = torch.diag(damage)  # no interactions: a unit does the root of the sum of squares
    group = Group(("head", "neuron"), terms, Sizes(held, (18.0, 18.0), (3, 3)), PruneOptions(uniform=True))
    path = path_of(group, Sketch(Hidden(None), [responses]))  # type: ignore[arg-type]
    order = [ids[k] for k in path.places.tolist()]
    heads = {(t.block, t.index) for t in order[: path.ends[-1]] if t.kind == "head"}
    assert heads == {(0, 3), (0, 4), (0, 5), (1, 0), (1, 1), (1, 2)}
    steps = [b - a for a, b in zip([0, *path.ends], path.ends, strict=False)]
    assert sorted(steps) == [2, 2, 6]
    assert sorted(order) == sorted(ids)
    neurons = [(t.block, t.index) for t in order[: path.ends[-1]] if t.kind == "neuron"]
    assert neurons == [(0, 0), (1, 1), (0, 2), (1, 2)]

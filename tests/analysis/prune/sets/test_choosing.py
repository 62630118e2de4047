"""Sets chosen on a model: by budget, by a share of the parameters, and in rounds."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import sample_reports as sample
import torch
from helpers import as_loaded, token_ids, two_single

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.run import PruneOutcome, prune_bound
from duat_cli.analysis.prune.sets.plan import worse_in_rounds
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.damage import Divergence
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.sets import SketchRound

JOINT = PruneOptions(kinds=("neuron", "head"), probes=8, measure=0, budget=0.05, joint=True, exceed=0.5, confidence=0.9)


@functools.cache
def model() -> Any:
    """Random, with logits large enough that something is lost."""
    found = two_single("llama")
    with torch.no_grad():
        found.lm_head.weight.mul_(4)
    return found


def given(count: int) -> list[Prompt]:
    return [Prompt("", str(k), token_ids(model(), 6 + k, k), k) for k in range(count)]


def outcome(options: PruneOptions, held_out: int = 0) -> PruneOutcome:
    prompts = given(2 + held_out)
    return prune_bound(as_loaded(model()), prompts[:2], prompts[2:], options, lambda *_: None)


def measured(found: PruneOutcome, terms: list[TermId]) -> float:
    """Mean over the prompts, by an ablator of its own."""
    ablator = Ablator(found.session.structure, found.ablator.sites, Divergence(model()))
    removed = ablator.removals(terms)
    damages = [ablator.damage(ablator.record(p.input_ids), p.input_ids, removed) for p in given(2)]
    return sum(damages) / len(damages)


def held(terms: list[TermId]) -> float:
    """Parameters of neurons and heads, by the widths of the model."""
    config = model().config
    head = config.hidden_size * config.head_dim * (2 + 2 * config.num_key_value_heads / config.num_attention_heads)
    return sum(head if term.kind == "head" else 3 * config.hidden_size for term in terms)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_share_of_the_parameters(of_all: bool) -> None:
    """The smallest set that holds them, whatever its damage; the report says which parameters."""
    found = outcome(replace(JOINT, remove=0.1, of_all=of_all))
    [plan] = found.report.plans
    whole = sum(p.numel() for p in (model() if of_all else model().model.layers).parameters())
    terms = found.chosen(plan)
    assert len(terms) == plan.removed
    assert plan.parameters == held(terms)
    assert held(terms) >= 0.1 * whole > held(terms[:-1])
    assert plan.parameters_share == pytest.approx(plan.parameters / whole)
    assert (plan.parameters_of, plan.granularity) == ("all" if of_all else "blocks", "neuron,head")
    assert plan.measured == pytest.approx(measured(found, terms), rel=1e-4)
    assert {term.kind for term in terms} <= {"neuron", "head"}


def test_one_set_within_the_budget_of_both_kinds() -> None:
    found = outcome(JOINT)
    [plan] = found.report.plans
    assert plan.of == 2 * model().config.intermediate_size + 2 * 4
    assert plan.measured is not None
    assert 0 < plan.measured <= 0.05
    assert plan.remove is None
    assert plan.measured == pytest.approx(measured(found, found.chosen(plan, "largest")), rel=1e-4)


def test_rounds_are_measured_beside_one_round_of_the_same_size() -> None:
    found = outcome(replace(JOINT, remove=0.3, rounds=3))
    [plan] = found.report.plans
    alone = outcome(replace(JOINT, remove=0.3))
    order, single = found.nested["neuron,head"].order, alone.nested["neuron,head"].order
    assert sorted(order) == sorted(single)
    assert len(plan.rounds) == 3
    first, *_, last = plan.rounds
    assert order[: first.removed] == single[: first.removed]
    assert first.measured == pytest.approx(first.single_measured, rel=1e-5)  # other rows beside it
    assert (last.removed, last.measured) == (plan.removed, pytest.approx(plan.measured, rel=1e-4))
    for one in plan.rounds:
        assert one.measured == pytest.approx(measured(found, order[: one.removed]), rel=1e-4)
        assert one.single_measured == pytest.approx(measured(found, single[: one.single_removed]), rel=1e-4)
        assert held(single[: one.single_removed]) >= held(order[: one.removed])
    wanted = 0.3 * sum(p.numel() for p in model().model.layers.parameters())
    assert [held(order[: one.removed]) >= wanted * k / 3 for k, one in enumerate(plan.rounds, 1)] == [True] * 3


def test_rounds_end_with_the_set_that_is_chosen_where_no_set_holds_the_share() -> None:
    [plan] = outcome(replace(JOINT, remove=0.9999, rounds=2)).report.plans
    assert plan.rounds[-1].removed == plan.removed == plan.of
    assert 0 < plan.rounds[0].removed < plan.removed


def test_uniform_sets_of_both_kinds_leave_the_file() -> None:
    found = outcome(replace(JOINT, remove=0.3, uniform=True, rounds=2))
    [plan] = found.report.plans
    assert plan.uniform
    assert plan.saves is not None
    assert plan.saves.terms_removed == plan.removed
    assert plan.saves.parameters_zeroed == 0
    assert plan.saves.parameters_removed == plan.parameters


def test_what_few_prompts_exceed() -> None:
    """With 6 prompts none may exceed at these levels: the largest damage."""
    found = outcome(replace(JOINT, remove=0.2), held_out=6)
    [plan] = found.report.plans
    assert plan.guarantee is not None
    last = plan.held_out[-1]
    assert last.removed == plan.removed
    assert last.limit is not None
    assert last.limit >= last.percentile_90
    assert len(found.chosen(plan)) == plan.removed


def test_wishes_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(InputError, match="more than 0 and less than 100"):
        replace(JOINT, remove=1.5)
    with pytest.raises(InputError, match="a part of another"):
        PruneOptions(kinds=("neuron", "ffn"), joint=True)
    with pytest.raises(InputError, match="--uniform"):
        PruneOptions(kinds=("attention", "ffn"), joint=True, uniform=True)


def test_rounds_that_bring_nothing_are_said() -> None:
    made = sample.plan("neuron", 100, 20)
    for measured, single, said in ((0.3, 0.2, True), (0.2, 0.3, False), (0.2, 0.2, False)):
        last = SketchRound(removed=made.removed, measured=measured, single_removed=22, single_measured=single)
        first = last.model_copy(update={"removed": 5, "measured": 9.0})
        notes = worse_in_rounds([made.model_copy(update={"rounds": [first, last]})])
        assert [("--rounds: the set of neurons does more damage (0.3)" in note) for note in notes] == [True] * said
    assert worse_in_rounds([made]) == []

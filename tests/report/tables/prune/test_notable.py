"""The answer of `duat prune-bound` in a few sentences: true of the numbers that stand beside it."""

from __future__ import annotations

from typing import Any

import sample_reports as sample

from duat_cli.report.tables.page import Page
from duat_cli.report.tables.prune.notable import notable, saving
from duat_cli.report.tables.prune.report import render_prune
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan


def asked(plan: Plan, **changes: Any) -> Plan:
    """A plan for a share of the model's parameters."""
    return plan.model_copy(update={"remove": 0.2, "parameters_of": "all", "parameters_share": 0.2, **changes})


def report_of(*plans: Plan, **changes: Any) -> PruneReport:
    return sample.prune_report().model_copy(update={"plans": list(plans), **changes})


def test_the_set_within_the_budget_that_holds_most_comes_first_with_what_the_file_saves() -> None:
    first, others, after = notable(sample.prune_report())
    assert "Within the budget of 0.100 nats/token most can go as neurons: 12040 of 46080 neurons hold 13.1 %" in first
    assert "the damage is 0.110 nats/token on 83 held-out prompts" in first
    assert "not guaranteed to keep to the budget of 0.100 (6020 of them are)" in first
    assert "It saves 20.8 M parameters, 41.6 MB in the file. That is 15.5 % of the model's parameters." in first
    assert "17 of 270 heads" in others
    assert "FFN" not in others, "of these no set stays within the budget"
    assert "--granularity neuron --uniform --budget 0.1 --apply DIR" in after


def test_what_is_next_can_be_done_where_weights_were_read_block_by_block() -> None:
    [*_, after] = notable(report_of(*sample.prune_report().plans, streamed=True))
    assert "--budget 0.1 --export FILE.json." in after
    assert after.endswith("--apply needs all weights in memory.")


def test_a_guaranteed_set_of_one_term_is_told_as_one() -> None:
    plan = sample.prune_report().plans[0]
    assert plan.guarantee is not None
    one = plan.model_copy(update={"guarantee": plan.guarantee.model_copy(update={"removed": 1})})
    assert "(1 of them is)" in notable(report_of(one))[0]


def test_of_sets_of_a_wanted_size_the_least_damaging_comes_first_and_short_ones_are_no_answer() -> None:
    neurons, heads = (asked(sample.plan(kind, of, 12)) for kind, of in (("neuron", 100), ("head", 40)))
    worse = heads.held_out[-1].model_copy(update={"mean": 0.5})
    heads = heads.model_copy(update={"held_out": [worse]})
    first, others, after = notable(report_of(heads, neurons))
    assert "To take out 20.0 % of the model's parameters, neurons do the least damage: 12 of 100 neurons" in first
    assert "damage 0.500 nats/token" in others
    assert "--granularity neuron --uniform --remove 20%/all --apply DIR" in after
    [first, _, _] = notable(report_of(heads, neurons.model_copy(update={"parameters_share": 0.05})))
    assert "heads do the least damage" in first
    short = neurons.model_copy(update={"parameters_share": 0.05})
    assert notable(report_of(short))[0].startswith("No set holds 20.0 % of the model's parameters: 12 of 100 neurons")


def test_less_in_the_file_than_was_asked_for_is_said() -> None:
    plan = asked(sample.plan("neuron", 100, 12), parameters=2000)
    for removed, short in ((1000, True), (1990, False)):
        saves = plan.saves and plan.saves.model_copy(update={"parameters_removed": removed})
        [first, _] = notable(report_of(plan.model_copy(update={"saves": saves})))
        assert ("less than was asked for: the other terms are zeroed and still stored" in first) is short


def test_a_set_that_saves_nothing_in_the_file_says_so_and_why() -> None:
    for uniform_leaves, uniform, said in (
        (["head"], False, "It saves nothing in the file: heads can leave only with --uniform."),
        (["head"], True, "It saves nothing in the file: what is removed is stored as zeros."),
        ([], False, "It saves nothing in the file: what is removed is stored as zeros."),
    ):
        plan = sample.plan("head", 40, 12).model_copy(update={"uniform": uniform})
        none = {"parameters_removed": 0, "bytes_removed": 0, "uniform_leaves": uniform_leaves}
        saves = plan.saves and plan.saves.model_copy(update=none)
        plan = plan.model_copy(update={"saves": saves})
        assert saving(plan, plan.saves) == said
        first, after = notable(report_of(plan))
        assert said in first
        assert ("so that heads can leave the file" in after) is (bool(uniform_leaves) and not uniform)
        assert plan.guarantee is not None
        nothing = plan.model_copy(update={"guarantee": plan.guarantee.model_copy(update={"saves": saves})})
        assert said in " ".join(render_prune(report_of(nothing), Page(120)).split("Guarantee")[1].split())


def test_a_set_that_no_file_can_hold_says_so_and_why() -> None:
    """As of blocks that are one module: --apply would refuse it, so it is not named."""
    plan = sample.plan("neuron", 100, 12)
    why = "blocks 0 and 1 are one module"
    none = {"parameters_removed": 0, "bytes_removed": 0, "uniform_leaves": [], "parameters_zeroed": None}
    saves = plan.saves and plan.saves.model_copy(update={**none, "reasons": {"parameters_zeroed": why}})
    first, after = notable(report_of(plan.model_copy(update={"saves": saves})))
    assert f"No checkpoint without it can be written: {why}." in first
    assert "--export FILE.json" in after
    assert "--apply" not in after


def test_of_several_kinds_only_those_that_can_leave_are_said_to() -> None:
    plan = sample.plan("neuron,head", 100, 12)
    saves = plan.saves and plan.saves.model_copy(update={"parameters_removed": 0, "uniform_leaves": ["neuron"]})
    first, after = notable(report_of(plan.model_copy(update={"saves": saves})))
    assert "It saves nothing in the file: neurons can leave only with --uniform." in first
    assert "so that neurons can leave the file" in after


def test_a_guaranteed_set_and_none_at_all() -> None:
    plan = sample.plan("neuron", 100, 12)
    assert plan.guarantee is not None
    whole = plan.model_copy(update={"guarantee": plan.guarantee.model_copy(update={"removed": 12})})
    [first, _] = notable(report_of(whole))
    assert "guaranteed with 99.9% confidence: at most 12.5% of prompts exceed the budget of 0.100." in first
    bare = plan.model_copy(update={"guarantee": None, "held_out": [], "mean_guarantee": None})
    [first, _] = notable(report_of(bare))
    assert "0.0929 nats/token on the prompts that chose the set, and nothing is guaranteed without" in first
    [only] = notable(sample.prune_report(nothing=True))
    assert only == "Nothing can go: no set of neurons, heads, FFNs stays within the budget of 0.100 nats/token."
    why = "the model has one block, and one has to stay"
    block = sample.plan("block", 1, 0).model_copy(update={"reasons": {"predicted": why}})
    assert notable(report_of(block)) == [f"No set was chosen; blocks: {why}."]
    assert notable(report_of()) == []


def test_what_was_written_needs_no_next_command() -> None:
    assert not any("--apply DIR" in text for text in notable(sample.prune_report(repaired=True)))


def test_a_part_of_a_model_is_not_written_alone() -> None:
    report = sample.prune_report()
    told = [
        len(notable(report.model_copy(update={"model": report.model.model_copy(update={"stack": stack})})))
        for stack in (None, "encoder", "vision", "text")
    ]
    assert told == [3, 3, 2, 2]


def test_the_terminal_ends_with_it() -> None:
    words = " ".join(render_prune(sample.prune_report(), Page(80)).split())
    assert words.index("Guarantee") < words.index("exact: ") < words.index("notable") < words.index("skipped")


def test_saved_and_zeroed_that_are_less_than_the_terms_hold_are_explained() -> None:
    plan = sample.plan("neuron", 100, 12)
    assert plan.saves is not None
    for held, said in ((20_000, False), (40_000, True)):
        text = render_prune(report_of(plan.model_copy(update={"parameters": held})), Page(80))
        assert ("what it reads with is stored as it was" in " ".join(text.split())) is said


def test_ablations_too_few_to_rank_are_one_sentence_in_place_of_tables_of_dashes() -> None:
    report = sample.prune_report().model_copy(update={"prediction": [sample.prediction("ffn", 2, 30)]})
    text = " ".join(render_prune(report, Page(120)).split("How well the prediction")[1].split())
    assert "Not ranked: ffn: 2 ablated terms are too few to be ranked" in text
    assert "worst factor: 4.73" in text
    assert "Spearman" not in text
    assert "Mean damage of really removing" not in text

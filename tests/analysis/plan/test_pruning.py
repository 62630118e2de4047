"""Terms of a peak of `prune-bound` against what a model has, and against sums written down by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers import as_loaded, single_model, token_ids

from duat_cli.analysis.plan.memory import peak
from duat_cli.analysis.plan.pruning import (
    PROBABILITIES,
    SETS,
    Carried,
    ablation_bytes,
    carried,
    followed_terms,
    printed_memory,
    printed_tokens,
    pruning,
    shared,
    singles,
    terms_of,
)
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.terms import REPLAYED, size_of
from duat_cli.analysis.prune.run import prune_bound
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import KINDS
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.models import budgets
from duat_cli.models.budgets import ABLATION_BYTES, GRADIENT_BYTES, probes_at_once, waiting_bytes
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import find_sites
from duat_cli.results.plan import Residence


@pytest.fixture
def shape() -> Shape:
    return shape_of(inspect_folder(demo_path()), "float32")


def all_terms(shape: Shape, tokens: list[int], weights: Residence, **options: Any) -> dict[str, int]:
    """The largest addend of each name, over all moments."""
    task = Task("prune-bound", tuple(tokens), pruning=PruneOptions(**options))
    found: dict[str, int] = {}
    for moment in pruning(shape, task, weights):
        for term in moment:
            found[term.what] = max(found.get(term.what, 0), term.bytes)
    return found


def test_terms_are_those_of_the_model(shape: Shape) -> None:
    structure = discover(load(None).model)
    known = TermList.of(structure, find_sites(structure), KINDS)
    counts = terms_of(shape, PruneOptions())
    assert sum(counts.values()) == len(known.ids) == 2358
    for kind in KINDS:
        assert counts[kind] == len([term for term in known.ids if term.kind == kind])
    assert singles(counts, PruneOptions(measure=5)) == 2 * 5 + 3 * 6  # whole parts: all six
    assert followed_terms(counts, PruneOptions(measure=5)) == 6 * 6 + 3 * 6
    assert followed_terms({"neuron": 9}, PruneOptions(kinds=("neuron",), measure=5)) == 5


def test_probes_stand_in_the_space_of_the_output(shape: Shape) -> None:
    logits, hidden = (all_terms(shape, [64], "resident", metric=metric) for metric in ("kl", "hidden"))
    assert logits["probes of the output"] == (32 + PROBABILITIES) * 64 * 2048 * 4
    assert hidden["probes of the output"] == (32 + PROBABILITIES) * 64 * 192 * 4
    assert probes_at_once(64 * 2048) > 32  # all at once; of long prompts a few
    long, longer = (all_terms(shape, [n], "resident")["probes of the output"] for n in (4096, 8192))
    assert long == longer


def test_gradients_are_as_many_as_fit(shape: Shape) -> None:
    few, many, more = (all_terms(shape, [256], "resident", probes=k)["gradients"] for k in (2, 4, 400))
    assert many == 2 * few
    assert 0.4 * GRADIENT_BYTES < more <= GRADIENT_BYTES
    assert more == all_terms(shape, [256], "resident", probes=900)["gradients"]


def test_prompts_are_all_recorded_where_weights_are_streamed(shape: Shape) -> None:
    what = "the prompts' own passes"
    for tokens in ([64], [64, 64, 64]):
        assert all_terms(shape, tokens, "resident")[what] == all_terms(shape, [64], "streamed")[what]
        assert all_terms(shape, tokens, "streamed")[what] == len(tokens) * all_terms(shape, [64], "streamed")[what]
    assert all_terms(shape, [64], "resident")[what] == 64 * (6 * 192 + 2048 + 64) * 4  # hidden states are kept once


def test_ablations_wait_up_to_their_limit(shape: Shape) -> None:
    what = "passes without a term"
    assert all_terms(shape, [64], "resident")[what] == 0
    assert 0 < all_terms(shape, [64], "streamed")[what] < all_terms(shape, [64] * 900, "streamed")[what]
    assert all_terms(shape, [64] * 900, "streamed")[what] == ABLATION_BYTES


def test_the_peak_is_that_of_the_largest_moment(shape: Shape) -> None:
    task = Task("prune-bound", (180, 20), pruning=PruneOptions())
    largest = peak(shape, task, "resident")
    assert size_of(largest) == max(map(size_of, pruning(shape, task, "resident")))
    assert size_of(largest) > size_of(peak(shape, Task("verify", (180, 20)), "resident"))


def test_processes_that_share_prompts_hold_what_a_prompt_takes_each(shape: Shape) -> None:
    """The report, made by one of them in the end, is no part of it."""
    task = Task("prune-bound", (180, 180, 180, 180), pruning=PruneOptions())
    moments = pruning(shape, task, "resident")
    one, two, three, four = (shared(shape, task, count)[-1].bytes for count in (1, 2, 3, 4))
    assert two == 2 * one < max(map(size_of, moments[:4]))
    assert 6 * two == 4 * three == 3 * four
    whole = size_of(shared(shape, task, 2))
    assert max(map(size_of, moments[:4])) < whole < 2 * max(map(size_of, moments[:4]))
    larger = dataclasses.replace(task, pruning=PruneOptions(probes=64))
    assert shared(shape, larger, 2)[-1].bytes == 2 * shared(shape, larger, 1)[-1].bytes > two


def test_the_longest_prompts_are_those_under_way_at_once(shape: Shape) -> None:
    def processes(*tokens: int) -> int:
        return shared(shape, Task("prune-bound", tokens, pruning=PruneOptions()), 2)[-1].bytes

    assert processes(20, 90, 60, 20) == processes(60, 90, 30, 50) < processes(90, 90, 20, 20)
    assert 2 * processes(90, 20) == pytest.approx(processes(90, 90) + processes(20, 20), abs=4)


def test_passes_that_wait_come_to_the_head_together(shape: Shape) -> None:
    """There stand the head, one output of as many rows as go side by side, and the longest held-out prompt's own."""
    task = Task("prune-bound", (64,) * 30, (128,) * 30, pruning=PruneOptions(kinds=("neuron",)))
    layer = dataclasses.replace(shape.parts.frame, name="lm_head.weight")
    shape = dataclasses.replace(shape, parts=dataclasses.replace(shape.parts, layers=[layer]))
    moments = [{term.what: term.bytes for term in moment} for moment in pruning(shape, task, "streamed")]
    [head] = [one for one in moments if "outputs of passes" in one]
    rows = 512 // 128
    assert head["outputs of passes"] == (rows + 1) * 128 * 2048 * 4
    assert {"lm_head.weight", "passes without a term"} <= set(head)
    hidden = dataclasses.replace(task, pruning=PruneOptions(kinds=("neuron",), metric="hidden"))
    found = [[term.what for term in moment] for moment in pruning(shape, hidden, "streamed")]
    assert not any({"outputs of passes", "lm_head.weight"} <= set(one) for one in found)


def test_logits_beside_another_metric_are_there_until_gradients_are_back(shape: Shape) -> None:
    task = Task("prune-bound", (64,) * 3, pruning=PruneOptions(metric="hidden"))
    found = [{term.what: term.bytes for term in moment} for moment in pruning(shape, task, "streamed")]
    assert [one.get("logits for Taylor's criterion") for one in found[:3]] == [3 * 64 * 2048 * 4] * 2 + [None]
    measured = dataclasses.replace(task, pruning=PruneOptions())
    every = [term for moment in pruning(shape, measured, "streamed") for term in moment]
    assert not any(term.bytes for term in every if term.what == "logits for Taylor's criterion")


def test_sets_are_planned_by_the_orders_that_they_are_of(shape: Shape) -> None:
    """Of all kinds together there is one; five of each are tried, beside the prompt's own pass. Sets of whole parts are
    measured later than those of neurons."""
    apart, joint = PruneOptions(kinds=("neuron", "head")), PruneOptions(kinds=("neuron", "head"), joint=True)
    waits = waiting_bytes(32, shape.width)
    for options, orders in ((apart, 2), (joint, 1)):
        task = Task("prune-bound", (64,), (32,) * 3, pruning=options)
        assert ablation_bytes(shape, task)[1] == 3 * (2 + 5 * orders) * waits
        compared = dataclasses.replace(task, pruning=dataclasses.replace(options, criteria=True))
        assert ablation_bytes(shape, compared)[1] == 3 * (2 + (5 + 28) * orders) * waits
    whole = PruneOptions(kinds=("neuron", "block"), measure=4)
    both, _ = ablation_bytes(shape, Task("prune-bound", (64,), (32,) * 3, pruning=whole))
    assert both == (4 + 6 + (SETS + whole.spent.points)) * waiting_bytes(64, shape.width)


# -- Eq. 16: against sums by hand, and against the prompts that a run takes -----------------------

PARTS = 2 * 3 * 6  # of each whole part, and of the stream without it
EARLY, LATE = (2 + 64) + (2 + 36), 3 * (2 + 6)  # the same of a set of each kind, and its terms, at most 64
ONCE = PARTS + EARLY + LATE


def test_memory_is_of_all_that_is_carried(shape: Shape) -> None:
    options = PruneOptions()
    task = Task("prune-bound", (40, 60, 20), pruning=options)
    assert carried(shape, options) == Carried(PARTS, EARLY, LATE)
    one, through = 192 * 4, REPLAYED * budgets.AT_ONCE * 192 * 60 * 4
    assert printed_memory(shape, task, streamed=False) == (60 * one * ONCE, through)
    tried = dataclasses.replace(task, held_out=(30,) * 40)
    assert printed_memory(shape, tried, streamed=True) == (120 * one * ONCE, through)
    on_trial = PARTS + EARLY + budgets.LIKELY_SETS * LATE  # those that are measured last
    assert printed_memory(shape, task, streamed=True) == (120 * one * on_trial, through)


def test_as_many_likely_sets_as_fit(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PruneOptions(kinds=("neuron", "head"), joint=True)
    task = Task("prune-bound", (40, 60), pruning=options)
    one, each = 100 * 192 * 4, 2 + 64
    for room, sets in ((9, budgets.LIKELY_SETS), (3, 3), (1, 1)):
        monkeypatch.setattr(budgets, "PRINTED_BYTES", room * one * each)
        assert printed_memory(shape, task, streamed=True)[0] == sets * one * each


def test_prompts_are_the_first_that_fit(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PruneOptions(whole=True)
    task = Task("prune-bound", (40, 6000, *[20] * 9), pruning=options)
    assert printed_tokens(shape, task) == [40, *[20] * 3]  # four; 6,000 tokens are too many
    monkeypatch.setattr(budgets, "PRINTED_BYTES", 60 * 192 * 4 * ONCE)
    assert printed_tokens(shape, task) == [40, 20]


def test_a_run_takes_as_many() -> None:
    options = PruneOptions(probes=2, measure=0, effort="quick", kinds=("head",), budget=9.0)
    model = single_model("llama")
    given = [Prompt("", str(k), token_ids(model, 5 + k, k), k) for k in range(4)]
    report = prune_bound(as_loaded(model), given, [], options, lambda *_: None).report
    assert {row.prompts for row in report.eq16} == {options.spent.printed}
    assert [row.name for row in report.eq16] == ["head"]

"""What is planned for Eq. 16 against sums by hand, and against the prompts that a run takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import as_loaded, single_model, token_ids

from duat_cli.analysis.plan.printed import Carried, carried, printed_memory, printed_tokens
from duat_cli.analysis.plan.pruning import terms_of
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.terms import REPLAYED
from duat_cli.analysis.prune.run import prune_bound
from duat_cli.kinds import Kind
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.prompts import Prompt
from duat_cli.models import budgets

COUNTS: dict[Kind, int] = {"neuron": 2304, "head": 36, "expert": 0, "ffn": 6, "attention": 6, "block": 6}
PARTS = 2 * 3 * 6  # of each whole part, and of the stream without it
EARLY, LATE = (2 + 64) + (2 + 36), 3 * (2 + 6)  # the same of a set of each kind, and its terms, at most 64
ONCE = PARTS + EARLY + LATE


@pytest.fixture
def shape() -> Shape:
    return shape_of(inspect_folder(demo_path()), "float32")


def test_memory_is_of_all_that_is_carried(shape: Shape) -> None:
    options = PruneOptions()
    task = Task("prune-bound", (40, 60, 20), pruning=options)
    assert terms_of(shape, options) == COUNTS
    assert carried(shape, COUNTS, options) == Carried(PARTS, EARLY, LATE)
    one, through = 192 * 4, REPLAYED * budgets.AT_ONCE * 192 * 60 * 4
    assert printed_memory(shape, task, COUNTS, options, streamed=False) == (60 * one * ONCE, through)
    tried = replace(task, held_out=(30,) * 40)
    assert printed_memory(shape, tried, COUNTS, options, streamed=True) == (120 * one * ONCE, through)
    on_trial = PARTS + EARLY + budgets.LIKELY_SETS * LATE  # those that are measured last
    assert printed_memory(shape, task, COUNTS, options, streamed=True) == (120 * one * on_trial, through)


def test_as_many_likely_sets_as_fit(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PruneOptions(kinds=("neuron", "head"), joint=True)
    task, counts = Task("prune-bound", (40, 60), pruning=options), terms_of(shape, options)
    one, each = 100 * 192 * 4, 2 + 64
    for room, sets in ((9, budgets.LIKELY_SETS), (3, 3), (1, 1)):
        monkeypatch.setattr(budgets, "PRINTED_BYTES", room * one * each)
        assert printed_memory(shape, task, counts, options, streamed=True)[0] == sets * one * each


def test_prompts_are_the_first_that_fit(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PruneOptions(whole=True)
    task = Task("prune-bound", (40, 6000, *[20] * 9), pruning=options)
    assert printed_tokens(shape, task, ONCE, options) == [40, *[20] * 3]  # four; 6,000 tokens are too many
    monkeypatch.setattr(budgets, "PRINTED_BYTES", 60 * 192 * 4 * ONCE)
    assert printed_tokens(shape, task, ONCE, options) == [40, 20]


def test_a_run_takes_as_many() -> None:
    options = PruneOptions(probes=2, measure=0, effort="quick", kinds=("head",), budget=9.0)
    model = single_model("llama")
    given = [Prompt("", str(k), token_ids(model, 5 + k, k), k) for k in range(4)]
    report = prune_bound(as_loaded(model), given, [], options, lambda *_: None).report
    assert {row.prompts for row in report.eq16} == {options.spent.printed}
    assert [row.name for row in report.eq16] == ["head"]

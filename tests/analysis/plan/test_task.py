"""What is spent: efforts, what goes before them, and what is left of the prompts."""

from __future__ import annotations

import pytest

from duat_cli.analysis.plan.task import EFFORTS, PruneOptions, Task, ablated, effort_of
from duat_cli.kinds import Kind


def test_what_is_given_goes_before_the_effort() -> None:
    assert effort_of("quick", None, None) == (EFFORTS["quick"].probes, EFFORTS["quick"].measure)
    assert effort_of("quick", 50, 0) == (50, 0)
    assert effort_of("default", None, None) == (32, 24)


def test_more_effort_is_more_of_everything() -> None:
    quick, default, thorough = (EFFORTS[name] for name in ("quick", "default", "thorough"))
    for name in ("probes", "measure", "points", "tested"):
        assert getattr(quick, name) < getattr(default, name) < getattr(thorough, name)
    assert (quick.certified, default.certified, thorough.certified) == (False, True, True)


def test_a_quick_plan_counts_short_prompts_and_few_held_out_ones() -> None:
    """46 prompts: 0.9^46 + 46 * 0.1 * 0.9^45 is below 0.05, and with 45 it is not."""
    quick = Task("prune-bound", (17, 200, 64), tuple(range(5, 88)), pruning=PruneOptions(effort="quick"))
    assert quick.chosen_on == (17, 64, 64)
    assert quick.tested_on == tuple(range(5, 51))
    whole = Task("prune-bound", (17, 200, 64), tuple(range(5, 88)), pruning=PruneOptions())
    assert (whole.chosen_on, whole.tested_on) == (whole.tokens, whole.held_out)


@pytest.mark.parametrize(
    ("kind", "count", "expected"), [("neuron", 99, 24), ("head", 5, 5), ("block", 80, 80), ("ffn", 200, 96)]
)
def test_whole_parts_are_ablated_four_times_as_often(kind: Kind, count: int, expected: int) -> None:
    assert ablated(kind, count, 24) == expected
    assert ablated(kind, count, 0) == 0

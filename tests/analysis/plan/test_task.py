"""What is spent: efforts, what goes before them, and what is left of the prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from duat_cli.analysis.plan.task import EFFORTS, PruneOptions, Task, ablated, effort_of, longest
from duat_cli.cli.shared.pruning import Pruning
from duat_cli.errors import InputError
from duat_cli.kinds import Kind


def test_what_is_given_goes_before_the_effort() -> None:
    assert effort_of("quick", None, None) == (EFFORTS["quick"].probes, EFFORTS["quick"].measure)
    assert effort_of("quick", 50, 0) == (50, 0)
    assert effort_of("default", None, None) == (32, 16)


def test_more_effort_is_more_of_everything() -> None:
    quick, default, thorough = (EFFORTS[name] for name in ("quick", "default", "thorough"))
    for name in ("probes", "measure", "points", "tested"):
        assert getattr(quick, name) < getattr(default, name) < getattr(thorough, name)
    assert (quick.certified, default.certified, thorough.certified) == (False, True, True)


@pytest.mark.parametrize(("exceed", "confidence", "needed"), [(0.1, 0.95, 29), (0.05, 0.95, 59), (0.5, 0.5, 1)])
def test_how_many_prompts_a_guarantee_takes(exceed: float, confidence: float, needed: int) -> None:
    options = PruneOptions(exceed=exceed, confidence=confidence)
    options.require_held_out(0)  # no guarantee is asked for
    options.require_held_out(needed)
    if needed > 1:
        with pytest.raises(InputError, match=f"at least {needed} are needed"):
            options.require_held_out(needed - 1)
    with pytest.raises(InputError, match=r"--criteria: sets are compared on held-out prompts; .*--holdout FILE"):
        replace(options, criteria=True).require_held_out(0)


def test_a_quick_plan_counts_short_prompts_and_few_held_out_ones() -> None:
    """46 prompts: 0.9^46 + 46 * 0.1 * 0.9^45 is below 0.05, and with 45 it is not."""
    given = (17, 2000, 64, 900)
    quick = Task("prune-bound", given, tuple(range(5, 88)), pruning=PruneOptions(effort="quick"))
    assert quick.chosen_on == (17, 151, 64, 151)
    assert quick.tested_on == tuple(range(5, 51))
    default = Task("prune-bound", given, tuple(range(5, 88)), pruning=PruneOptions())
    assert default.chosen_on == (17, 343, 64, 343)
    assert default.tested_on == default.held_out
    whole = Task("prune-bound", given, (), pruning=PruneOptions(effort="thorough"))
    assert whole.chosen_on == whole.tokens
    kept = Task("prune-bound", given, (), pruning=PruneOptions(whole=True))
    assert kept.chosen_on == kept.tokens


@pytest.mark.parametrize(
    ("tokens", "cut"), [((768,), None), ((769,), 768), ((20, 48) * 50, None), ((20, 90) * 50, 48), ((), None)]
)
def test_the_longest_prompts_are_cut_to_a_number_of_tokens_together(tokens: tuple[int, ...], cut: int | None) -> None:
    assert longest(tokens, EFFORTS["default"]) == cut


@pytest.mark.parametrize(
    ("kind", "count", "expected"), [("neuron", 99, 24), ("head", 5, 5), ("block", 80, 80), ("ffn", 200, 96)]
)
def test_whole_parts_are_ablated_four_times_as_often(kind: Kind, count: int, expected: int) -> None:
    assert ablated(kind, count, 24) == expected
    assert ablated(kind, count, 0) == 0


def test_a_picture_or_a_sound_is_cut_nowhere() -> None:
    task = Task("prune-bound", tokens=(1500, 1500), pruning=PruneOptions())
    assert task.chosen_on == (384, 384)
    assert replace(task, probe=1500).chosen_on == (1500, 1500)


def test_the_help_and_the_page_say_what_an_effort_takes() -> None:
    quick, usual, thorough = (EFFORTS[effort] for effort in ("quick", "default", "thorough"))
    assert f"cut to {quick.tokens} tokens together (by default {usual.tokens})" in Pruning.effort.help
    page = " ".join((Path(__file__).parents[3] / "configs" / "docs" / "pruning.md").read_text(encoding="utf-8").split())
    assert f"until all are {usual.tokens} tokens together (none below {usual.shortest}," in page
    taken = f"takes {quick.probes} random directions, ablates {quick.measure} terms of each kind"
    measured = (
        f"measures about {quick.points} sets of each order and tests {quick.tested}, cuts to {quick.tokens} tokens"
    )
    assert taken in page
    assert measured in page
    more = f"takes {thorough.probes} directions, {thorough.measure} terms, about {thorough.points} sets of each order"
    assert f"{more}, of which it tests {thorough.tested}, and whole prompts" in page

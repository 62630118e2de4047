"""How large a repaired set may be, and its held-out test, with damages that are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pruning import prompts
from torch import nn

from duat_cli.analysis.plan.task import EFFORTS, PruneOptions, Spent
from duat_cli.analysis.prune.repair.choice import repair_sets
from duat_cli.analysis.prune.repair.refit import Refit
from duat_cli.analysis.prune.repair.repairer import Damages, Repaired
from duat_cli.analysis.prune.sets.nested import Nested, Point
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId

LAYERS = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
OPTIONS = PruneOptions(budget=0.5)


class Fake:
    """A repairer that halves the damage of a set, size / 100 a prompt unless told otherwise."""

    tokens = 50

    def __init__(self, damage: Callable[[int, int], float], *, short: int = 0) -> None:
        self.damage_of, self.short, self.asked = damage, short, list[int]()
        self.calibration = prompts(3)

    def repaired(self, terms: Sequence[TermId], limit: float = 0) -> Repaired:
        self.asked.append(len(terms))
        refit = Refit(ridges=dict(zip(LAYERS, (0.1, 1.0), strict=True)), unchanged=1, short=self.short)
        return Repaired(refit, self.damages(terms, None, prompts(4), ""), dropped=False)

    def damages(self, terms: Sequence[TermId], repaired: Any, on: Sequence[Prompt], what: str) -> Damages:
        found = [self.damage_of(prompt.line, len(terms)) for prompt in on]
        return [(damage, damage / 2) for damage in found]

    def skipped(self, refits: Sequence[Refit]) -> list[Any]:
        return [len(refits)]


def nested(size: int, step: int, chosen: int | None = None) -> Nested:
    """A curve of sizes a step apart."""
    curve = [Point(k, k / 90, k / 100) for k in range(step, size + 1, step)]
    picked = next((point for point in curve if point.removed == chosen), None)
    return Nested(("neuron",), [TermId("neuron", 0, k) for k in range(size)], curve, picked)


@pytest.mark.parametrize("most", [5, 40, 95, 100, 200])
def test_the_largest_set_within_the_budget_is_found(most: int) -> None:
    """Damage with repair: half a hundredth a term; sets of up to 100 are within 0.5, so all of up to `most` tried."""
    fake = Fake(lambda _, removed: removed / 100)
    found = repair_sets(fake, {"neuron": nested(most, 5, chosen=5)}, [], OPTIONS)  # type: ignore[arg-type]
    chosen, report = found.nested["neuron"].chosen, found.reports["neuron"]
    assert chosen is not None
    assert chosen.removed == min(most, 100)
    assert chosen.measured == pytest.approx(min(most, 100) / 200)
    assert chosen.predicted == chosen.removed / 90
    assert len(fake.asked) <= 7
    assert found.trials == {}
    assert [one.removed for one in report.chosen_on] == sorted(set(fake.asked))
    assert report.held_out == []


def test_nothing_within_the_budget() -> None:
    fake = Fake(lambda _, removed: 1.0 + removed)
    found = repair_sets(fake, {"neuron": nested(40, 5)}, prompts(60), OPTIONS)  # type: ignore[arg-type]
    assert found.nested["neuron"].chosen is None
    assert found.reports == {}
    assert found.trials == {}
    assert found.nested["neuron"].order == nested(40, 5).order


def test_the_held_out_test_is_of_the_repaired_sets_and_stops_where_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 prompts, those below removed / 4 have a damage of 1.2, which repair makes 0.6: above the budget."""
    monkeypatch.setitem(EFFORTS, "default", Spent(tested=8))
    held_out = prompts(60)
    fake = Fake(lambda prompt, removed: 1.2 if prompt < removed / 4 and prompt > 3 else 0.2)
    found = repair_sets(fake, {"neuron": nested(80, 10)}, held_out, OPTIONS)  # type: ignore[arg-type]
    trial, report = found.trials["neuron"], found.reports["neuron"]
    assert trial.sizes == [10, 20, 30, 40, 50, 60, 70, 80]
    # at most two of 60 may exceed (P(Bin(60, 0.1) <= 2) = 0.053): none of 10, one of 20, four of 30
    assert trial.choice() == 1
    assert trial.exceeded[0] == 0
    assert trial.exceeded[1] == 1
    assert trial.exceeded[2] == 4
    runs = {each.removed: each for each in report.held_out}
    assert runs[80].prompts == 60
    assert runs[20].share_exceeded_before == runs[20].share_exceeded_after == pytest.approx(1 / 60)
    assert runs[20].mean_before == pytest.approx(2 * runs[20].mean_after)
    assert runs[80].percentile_90_before == pytest.approx(1.2)
    assert found.skipped == [len(fake.asked)]
    assert report.refitted == 2
    assert (report.ridge_low, report.ridge_high) == (0.1, 1.0)
    assert (report.calibration_prompts, report.calibration_tokens) == (3, 50)


def test_too_few_tokens_are_a_warning() -> None:
    for short in (0, 2):
        fake = Fake(lambda _, removed: removed / 100, short=short)
        found = repair_sets(fake, {"neuron": nested(20, 5)}, [], OPTIONS)  # type: ignore[arg-type]
        assert [("50 calibration tokens" in text) for text in found.warnings] == [True] * bool(short)

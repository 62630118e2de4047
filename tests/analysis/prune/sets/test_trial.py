"""The trial of nested sets on held-out prompts: both statements are true as printed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers import single_model, token_ids
from pruning import Fake, prompts

from duat_cli.analysis.plan.task import EFFORTS, PruneOptions, Spent
from duat_cli.analysis.prune.sets.nested import Nested, Point
from duat_cli.analysis.prune.sets.trial import CAP, Trial, try_alone, try_together
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.damage import metric_for
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import discover
from duat_cli.models.sweep.lockstep import Pass, one_by_one
from duat_cli.models.sweep.passes import Leading
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.statistics.betting import mean_is_below
from duat_cli.statistics.binomial import allowed, prompts_needed


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are tested, about."""
    monkeypatch.setitem(EFFORTS, "default", Spent(tested=8))


def tried(fake: Fake, sets: Nested, held_out: list[Prompt], budget: float, share: float, confidence: float) -> Trial:
    trial = Trial(sets, len(held_out), PruneOptions(budget=budget, exceed=share, confidence=confidence))
    try_alone(fake, [trial], held_out, lambda *_: None)  # type: ignore[arg-type]
    return trial


def guaranteed(
    fake: Fake, sets: Nested, held_out: list[Prompt], budget: float, share: float, confidence: float
) -> tuple[int | None, list[int]]:
    trial = tried(fake, sets, held_out, budget, share, confidence)
    return trial.choice(), trial.sizes


def nested(size: int) -> Nested:
    return Nested(("head",), [TermId("head", 0, k) for k in range(size)], [], Point(size, 0.0, 0.0))


@pytest.mark.parametrize(("share", "confidence"), [(0.1, 0.95), (0.2, 0.8), (0.3, 0.9)])
def test_the_statement_fails_no_more_often_than_it_says(share: float, confidence: float) -> None:
    """Prompts drawn anew from a population in which the true share above the budget is known for every set."""
    truth = {1: 0.3 * share, 2: 0.8 * share, 3: 1.02 * share, 4: 1.3 * share}  # the larger the set, the more exceed
    generator = torch.Generator().manual_seed(11)
    rounds, wrong, given = 250, 0, 0
    for _ in range(rounds):
        drawn = torch.rand(60, generator=generator).tolist()
        fake = Fake(lambda prompt, removed, drawn=drawn: float(drawn[prompt] < truth[removed]))
        choice, sizes = guaranteed(fake, nested(4), prompts(60), 0.5, share, confidence)
        if choice is not None:
            given += 1
            wrong += truth[sizes[choice]] > share
    assert given > 0.3 * rounds
    assert wrong / rounds <= (1 - confidence) + 3 * ((1 - confidence) * confidence / rounds) ** 0.5
    assert wrong > 0  # the level is used, not undercut by far


@pytest.mark.parametrize(("budget", "share", "confidence"), [(1.0, 0.1, 0.95), (0.6, 0.3, 0.8), (0.3, 0.1, 0.9)])
def test_scipy_counts_the_same_though_sets_that_failed_are_run_no_more(
    budget: float, share: float, confidence: float
) -> None:
    """From all damages of all sets: binomial tests in order, and the mean's as long as it is shown."""
    stats = pytest.importorskip("scipy.stats")
    generator, stopped = torch.Generator().manual_seed(2), set()
    for _ in range(12):
        effect = torch.randn(90, generator=generator, dtype=torch.float64).exp() / 6
        every = [(size * effect).tolist() for size in range(1, 9)]
        trial = tried(
            Fake(lambda prompt, removed, every=every: every[removed - 1][prompt]), nested(8), prompts(90), budget,
            share, confidence,
        )  # fmt: skip
        counts = [sum(value > budget for value in row) for row in every]
        passed = [stats.binomtest(k, 90, share, alternative="less").pvalue <= 1 - confidence for k in counts]
        first = next((k for k, one in enumerate(passed) if not one), 8)
        assert trial.choice() == (first - 1 if first else None)
        assert [trial.exceeded[k] for k in range(min(first + 1, 8))] == counts[: first + 1]
        shown = [mean_is_below(row, budget, CAP * budget, confidence) for row in every]
        first_mean = next((k for k, one in enumerate(shown) if not one), 8)
        assert trial.mean_choice() == (first_mean - 1 if first_mean else None)
        stopped.add(min(map(len, trial.damages)) < 90)
    assert True in stopped


def test_the_counts_are_those_of_the_set_that_is_named() -> None:
    fake = Fake(lambda prompt, removed: 1.0 if prompt < (removed - 10 if removed < 15 else 30) else 0.0)
    trial = tried(fake, nested(16), prompts(100), 0.5, 0.1, 0.95)
    assert trial.sizes == [2, 4, 6, 8, 10, 12, 14, 16]
    assert allowed(100, 0.1, 0.95) == 4
    assert trial.choice() == 6
    assert trial.exceeded[6] == 4


def test_sets_between_the_first_that_failed_and_the_chosen_one_are_run_no_more() -> None:
    """They did nothing on the first 20 prompts; then their mean is beyond what the rest could make up for."""
    fake = Fake(lambda prompt, removed: 100.0 if removed > 5 and prompt >= 20 else 0.0)
    trial = tried(fake, nested(16), prompts(100), 0.5, 0.1, 0.95)
    assert trial.choice() == 1
    assert [len(seen) for seen in trial.damages] == [100, 100, 100, 41, 41, 41, 41, 100]
    assert fake.runs == 4 * 100 + 4 * 41


def test_the_mean_may_be_within_the_budget_where_many_prompts_exceed_it() -> None:
    """A third of the prompts is above the budget, the mean is at three quarters of it."""
    fake = Fake(lambda prompt, removed: (1.15 if prompt % 3 == 0 else 0.55) if removed > 4 else 0.1)
    trial = tried(fake, nested(8), prompts(400), 1.0, 0.1, 0.95)
    assert trial.sizes == list(range(1, 9))
    assert trial.choice() == 3
    assert trial.mean_choice() == 7
    assert trial.capped(7) == 0


def test_one_large_damage_counts_for_no_more_than_the_cap() -> None:
    fake = Fake(lambda prompt, removed: 1e9 if prompt == 0 else 0.1)
    trial = tried(fake, nested(1), prompts(200), 1.0, 0.1, 0.95)
    assert trial.mean_choice() == 0
    assert trial.capped(0) == 1
    assert trial.most == CAP


def test_the_mean_is_shown_no_more_often_wrongly_than_it_says() -> None:
    """Heavy-tailed damages, capped as the statement says; the true mean of the last set is just above the budget."""
    generator = torch.Generator().manual_seed(3)
    population = torch.randn(200_000, generator=generator, dtype=torch.float64).exp()
    scale = 1.0
    for _ in range(60):  # so that the mean of min(damage, cap) is 1.02
        scale *= 1.02 / float((scale * population).clamp_max(CAP).mean())
    rounds, wrong = 400, 0
    for _ in range(rounds):
        drawn = (scale * population[torch.randint(len(population), (60,), generator=generator)]).tolist()
        fake = Fake(lambda prompt, removed, drawn=drawn: drawn[prompt] * (1.0 if removed > 1 else 0.3))
        trial = tried(fake, nested(2), prompts(60), 1.0, 0.1, 0.9)
        wrong += trial.mean_choice() == 1
    assert wrong / rounds <= 0.1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sets_of_few_terms(size: int) -> None:
    choice, sizes = guaranteed(Fake(lambda *_: 0.0), nested(size), prompts(40), 0.5, 0.1, 0.95)
    assert sizes == list(range(1, size + 1))
    assert choice == size - 1


def test_too_few_prompts_are_refused() -> None:
    needed = prompts_needed(0.1, 0.95)
    assert needed == 29  # 0.9^29 < 0.05 < 0.9^28
    with pytest.raises(InputError, match="29"):
        guaranteed(Fake(lambda *_: 0.0), nested(2), prompts(28), 0.5, 0.1, 0.95)


def test_rows_that_cannot_be_told_apart_are_tried_again_one_by_one() -> None:
    """Found out when sets are tried: what ran in rows before had no FFN in it."""
    model = single_model("llama")
    structure = discover(model)
    sites = find_sites(structure)
    ablator = Ablator(structure, sites, metric_for("hidden", model, structure))
    held_out = [Prompt("", str(k), token_ids(model, 9, k), k) for k in range(6)]
    heads = [ablator.removals([TermId("head", 0, k)]) for k in range(3)]
    ablator.effects(ablator.record(held_out[0].input_ids), held_out[0].input_ids, heads)
    assert ablator.rows.apart
    sets = Nested(("ffn",), [TermId("ffn", k, 0) for k in range(3)], [], Point(3, 0.0, 0.0))
    both = [Trial(sets, 6, PruneOptions(budget=9.0, exceed=0.5, confidence=0.9)) for _ in range(2)]
    [site] = sites[structure.calls[0]].of("ffn")
    handle = site.watched.register_forward_hook(lambda _module, _args, output: output.reshape(1, -1, output.shape[-1]))
    try:
        try_together(ablator, both[:1], held_out, one_by_one)
        assert ablator.rows.apart is False
        try_alone(ablator, both[1:], held_out, lambda *_: None)
    finally:
        handle.remove()
    assert both[0].damages == both[1].damages
    assert min(map(min, both[0].damages)) > 0


def test_one_prompts_own_output_is_there_at_a_time() -> None:
    """Its sets go behind it; logits of all held-out prompts together would be the largest tensor of a run."""
    model = single_model("llama")
    structure = discover(model)
    ablator = Ablator(structure, find_sites(structure), metric_for("kl", model, structure))
    held_out = [Prompt("", str(k), token_ids(model, 9, k), k) for k in range(4)]
    sets = Nested(("ffn",), [TermId("ffn", k, 0) for k in range(3)], [], Point(3, 0.0, 0.0))
    both = [Trial(sets, 4, PruneOptions(budget=9.0, exceed=0.5, confidence=0.9)) for _ in range(2)]
    most = 0

    def run(passes: Sequence[Pass]) -> None:
        nonlocal most
        for one in passes:
            one_by_one([one])
            leading = [each for each in passes if isinstance(each, Leading)]
            most = max(most, sum(hasattr(each._pass, "output") for each in leading))

    try_together(ablator, both[:1], held_out, run)
    try_alone(ablator, both[1:], held_out, lambda *_: None)
    assert most == 1
    assert both[0].damages[0] == pytest.approx(both[1].damages[0], rel=1e-6)

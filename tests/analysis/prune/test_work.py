"""Weights read block by block: every number as with all of them in memory, and how many reads it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import paging
import pytest
import torch
from helpers import single_model, token_ids
from paging import in_parts, whole
from sharing import SHARING

from duat_cli.analysis.prune.run import PruneOptions, PruneOutcome, begin, prune_bound
from duat_cli.analysis.prune.sets.nested import Nested, Point
from duat_cli.analysis.prune.sets.trial import Trial
from duat_cli.errors import InputError
from duat_cli.kinds import WHOLE, Kind
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import resolve
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId

OPTIONS = PruneOptions(probes=2, measure=2, budget=0.3, exceed=0.5, confidence=0.9, effort="quick")
TYPES = ["albert", "lfm2_moe"]  # albert's blocks share one page; experts and mixers in lfm2_moe
HELD_OUT = 4  # as many as a guarantee takes under these options


def opened(folder: str, *, paged: bool) -> LoadedModel:
    place = resolve(folder, revision=None, token=None, cache_dir=None, trust_remote_code=False)
    return load_files(place, inspect_folder(place.path), paged=paged)


def drawn(loaded: LoadedModel) -> tuple[list[Prompt], list[Prompt]]:
    """Two prompts, and more that are held out, all of several lengths."""
    made = [Prompt("", str(k), token_ids(loaded.model, 5 + k % 4, k), k) for k in range(2 + HELD_OUT)]
    return made[:2], made[2:]


def run(
    folder: str, options: PruneOptions, *, paged: bool, trial: bool = False, waiting: int | None = None
) -> tuple[PruneOutcome, float]:
    """The outcome, and how often all bytes of the files were read. waiting: as of `LoadedModel`."""
    loaded = replace(opened(folder, paged=paged), waiting=waiting)
    given, held_out = drawn(loaded)
    outcome = prune_bound(loaded, given, held_out if trial else [], options, lambda *_: None)
    if loaded.paged is None:
        return outcome, 0.0
    return outcome, loaded.paged.pager.bytes_read / loaded.files.total_bytes


def numbers(outcome: PruneOutcome) -> dict[str, Any]:
    return outcome.report.model_dump(mode="json", exclude={"run", "streamed"})


def same(streamed: PruneOutcome, resident: PruneOutcome) -> bool:
    """Whether all numbers are the same but for rounding: other sets may go side by side."""
    return _close(numbers(streamed), numbers(resident))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-6, abs=1e-12)
    return bool(one == other)


def saved(model_type: str, folder: Path) -> str:
    return str(paging.two_saved(model_type, folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("model_type", TYPES)
def test_five_reads_and_the_same_report(model_type: str, tmp_path: Path) -> None:
    """Forwards, backwards, forwards with the ablations, for sets of the whole parts that these ordered, and for Eq. 16
    of the chosen sets with their trial, beside which sets of other criteria go."""
    folder, options = saved(model_type, tmp_path), replace(OPTIONS, criteria=True, effort="default")
    resident, _ = run(folder, options, paged=False, trial=True)
    streamed, read = run(folder, options, paged=True, trial=True)
    assert same(streamed, resident)
    assert (streamed.report.streamed, resident.report.streamed) == (True, False)
    assert any(plan.guarantee is not None for plan in resident.report.plans)
    found = [one for plan in resident.report.plans for one in plan.criteria]
    assert {"duat", "magnitude", "random"} <= {one.criterion for one in found}
    assert all(one.prompts == HELD_OUT for one in found)
    assert 1 <= read <= 5


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, metric="hidden", ablate_mean=True),
        replace(OPTIONS, metric="nll", kinds=("head", "block")),
        replace(OPTIONS, kinds=("neuron",), measure=0, budget=0.35),
    ],
    ids=["hidden states and means", "nll", "no ablation"],
)
def test_no_option_costs_a_read_more(options: PruneOptions, llama: str) -> None:
    """Nor do they without a trial: Eq. 16 goes beside what measures the sets, those of whole parts last."""
    resident, _ = run(llama, options, paged=False)
    streamed, read = run(llama, options, paged=True)
    assert same(streamed, resident)
    assert all(plan.guarantee is None for plan in resident.report.plans)
    assert read <= (4 if set(options.kinds) & WHOLE else 3)


def test_logits_that_the_metric_does_not_look_at_go_once_their_loss_has_a_slope(llama: str) -> None:
    """Those of all prompts would be the largest tensors of the run."""
    loaded = opened(llama, paged=True)
    given, _ = drawn(loaded)
    begun = begin(loaded, given, [], replace(OPTIONS, metric="hidden", kinds=("head",)), lambda *_: None)
    kept = begun.work._ground.logits
    assert [kept[number].shape[1] for number in kept] == [prompt.input_ids.shape[1] for prompt in given]
    begun.work.run()
    assert not kept


@pytest.mark.parametrize("kinds", [("head", "neuron"), ("head", "block", "ffn")], ids=["terms", "whole parts"])
def test_a_set_that_was_not_likely_to_be_chosen_costs_one_read(
    kinds: tuple[Kind, ...], llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no number, nor does it where one set of several is missing."""
    options = replace(OPTIONS, kinds=kinds, budget=0.6)
    likely, fewest = run(llama, options, paged=True)
    asked = Nested.likely

    def wrong(one: Nested, budget: float, most: int) -> list[int]:
        return [one.curve[0].removed] if one.name == kinds[-1] else asked(one, budget, most)

    monkeypatch.setattr(Nested, "likely", wrong)
    missed, read = run(llama, options, paged=True)
    assert all(plan.removed > 1 for plan in likely.report.plans if plan.granularity == kinds[-1])
    assert {row.name for row in likely.report.eq16 if row.what == "set"} == set(kinds)
    assert same(missed, likely)
    assert 0.5 < read - fewest <= 1


def test_layers_outside_of_blocks_may_be_read_too(tmp_path: Path) -> None:
    """albert's blocks stand behind a layer that is read: what waits there must not find its block in memory."""
    given = [Prompt("", str(k), torch.arange(40, 46 + k)[None], k) for k in range(2 + HELD_OUT)]
    with in_parts(paging.two_saved("albert", tmp_path)) as loaded:
        streamed = prune_bound(loaded, given[:2], given[2:], OPTIONS, lambda *_: None)
    resident = prune_bound(whole(tmp_path), given[:2], given[2:], OPTIONS, lambda *_: None)
    assert same(streamed, resident)


@pytest.mark.parametrize("model_type", SHARING)
def test_what_blocks_hand_on(model_type: str, tmp_path: Path) -> None:
    """Also from a block one of whose heads is gone, or that is passed over."""
    folder, options = saved(model_type, tmp_path), replace(OPTIONS, kinds=("head", "block"))
    assert same(run(folder, options, paged=True)[0], run(folder, options, paged=False)[0])


def test_what_does_not_fit_goes_in_waves(llama: str) -> None:
    """Ablations one by one, held-out prompts one by one: more reads, the same numbers."""
    options = replace(OPTIONS, kinds=("head",), measure=2)
    resident, _ = run(llama, options, paged=False, trial=True)
    reads = []
    for waiting in (1, 20_000, None):
        streamed, read = run(llama, options, paged=True, trial=True, waiting=waiting)
        assert same(streamed, resident)
        reads.append(read)
    assert reads[0] > reads[1] > reads[2]


def test_rows_that_see_each_other_are_run_one_by_one(llama: str) -> None:
    """Also where weights are read block by block, which then takes one read more."""
    options = replace(OPTIONS, kinds=("head",))
    found, reads = [], []
    for paged, seen in ((False, True), (True, True), (True, False)):
        loaded = opened(llama, paged=paged)
        if seen:  # an FFN that adds the mean over the whole batch
            loaded.model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, out: out + out.mean())
        found.append(prune_bound(loaded, drawn(loaded)[0], [], options, lambda *_: None))
        reads.append(0 if loaded.paged is None else loaded.paged.pager.bytes_read / loaded.files.total_bytes)
    assert same(found[1], found[0])
    assert not same(found[2], found[0])
    assert reads[1] > reads[2] + 0.5


def test_the_chosen_set_is_written_from_weights_that_are_read(llama: str) -> None:
    terms = [TermId("head", 1, 1), TermId("neuron", 0, 3), TermId("block", 1)]
    written = [
        run(llama, replace(OPTIONS, kinds=("head",)), paged=paged)[0].exported(terms, ".json")
        for paged in (False, True)
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_weights_that_are_not_finite_are_refused_when_they_have_been_read(name: str, tmp_path: Path) -> None:
    """Also in a row of the embedding that no prompt needs."""
    model = single_model("llama")
    with torch.no_grad():
        model.get_submodule(name).weight[-1, 4] = torch.inf
    model.save_pretrained(tmp_path)
    message = rf"{name}\.weight holds 1 values that are NaN or infinite"
    with in_parts(tmp_path) as loaded, pytest.raises(InputError, match=message):
        prune_bound(loaded, drawn(loaded)[0], [], OPTIONS, lambda *_: None)


def test_a_set_that_failed_is_not_counted_beside_the_prompt_it_failed_on(llama: str) -> None:
    """Side by side more is run than one after the other, where the failure ends it; the choice is the same."""
    options = replace(OPTIONS, budget=0.004, kinds=("head", "neuron"))
    resident, _ = run(llama, options, paged=False, trial=True)
    streamed, read = run(llama, options, paged=True, trial=True)
    assert same(streamed, resident)
    assert read <= 4  # without whole parts


def test_only_sets_that_are_alive_are_asked_for() -> None:
    chosen = Nested(("head",), [TermId("head", 0, k) for k in range(4)], [], Point(4, 0.0, 0.0))
    trial, asked = Trial(chosen, 7, PruneOptions(budget=0.5, exceed=0.5, confidence=0.9)), list[int]()

    def damage(number: int) -> float:
        asked.append(number)
        return 9.0 * (number > 0)

    for _ in range(7):
        for k in trial.running:
            trial.add(k, damage(k))
    assert trial.running == [0, 1, 3]
    assert asked.count(1) == asked.count(3) == 7
    assert asked.count(2) < 7


def test_a_joint_set_is_the_same_from_weights_that_are_read(llama: str) -> None:
    """Without a further read; sketching again would take more, and is refused."""
    options = replace(OPTIONS, kinds=("neuron", "head"), joint=True, remove=0.3, uniform=True)
    resident, _ = run(llama, options, paged=False, trial=True)
    streamed, read = run(llama, options, paged=True, trial=True)
    assert same(streamed, resident)
    assert [plan.granularity for plan in resident.report.plans] == ["neuron,head"]
    assert read <= 4
    with pytest.raises(InputError, match=r"--rounds: .* where the model fits"):
        run(llama, replace(options, rounds=2), paged=True)

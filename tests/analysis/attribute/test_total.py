"""Means and spreads over predictions against loops over each alone."""

from __future__ import annotations

import statistics
from dataclasses import replace

import helpers
import pytest
from attributing import WORDS, report_of
from helpers import token_ids, two_single

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.loading.texts import Field

TARGETS = {4: "t50", 6: "t60", 7: "t70"}  # by the prompt's length, which stands for its line


def test_means_and_spreads_are_those_of_the_predictions() -> None:
    model = two_single("gpt2").double()
    prompts = [token_ids(model, tokens=n, seed=n) for n in TARGETS]
    report = attribute(
        helpers.as_loaded(model),
        [replace(helpers.prompt_of(ids), line=ids.shape[1]) for ids in prompts],
        WORDS,
        AttributeOptions(Asked(), 4, each=(Field("--target-field", "answer", TARGETS), None)),
        lambda *_: None,
    )
    alone = [
        report_of(model, ids, top=10_000, target=text).attribution[0]
        for ids, text in zip(prompts, TARGETS.values(), strict=True)
    ]
    summary = report.summary
    assert summary is not None
    assert summary.predictions == 3
    assert summary.logit == pytest.approx(statistics.mean(one.logit for one in alone))
    assert summary.tokens == pytest.approx(statistics.mean(sum(t.value for t in one.parts.tokens) for one in alone))
    assert summary.units[1] == pytest.approx(
        statistics.mean(sum(u.value for u in one.parts.units if u.block == 1) for one in alone)
    )
    heads: dict[tuple[int, int], list[float]] = {}
    neurons: dict[tuple[int, int], list[float]] = {}
    for one in alone:
        for head in one.direct.heads:
            heads.setdefault((head.block, head.head), []).append(head.moved)
        for neuron in one.parts.neurons:
            neurons.setdefault((neuron.block, neuron.index), []).append(neuron.value)
    for found, known in ((summary.heads, heads), (summary.neurons, neurons)):
        means = {place: statistics.mean(map(abs, values)) for place, values in known.items()}
        assert [(s.block, s.index) for s in found] == sorted(means, key=lambda place: -means[place])[:4]
        for spread in found:
            values = known[spread.block, spread.index]
            assert spread.mean == pytest.approx(statistics.mean(values))
            assert spread.mean_absolute == pytest.approx(means[spread.block, spread.index])
            assert spread.deviation == pytest.approx(statistics.pstdev(values), abs=1e-9)


def test_one_prediction_has_no_summary() -> None:
    model = two_single("llama")
    report = report_of(model, token_ids(model))
    assert report.summary is None
    assert report.reasons["summary"] == "there is one prediction"

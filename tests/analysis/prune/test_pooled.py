"""Cosines of pooled outputs, against the model's own with weights set to zero."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import as_loaded, minilm, single_model, token_ids
from paging import in_parts, whole

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.pooled import NO_HOLDOUT, REPAIRED, pooled_cosines
from duat_cli.analysis.prune.run import begin, prune_bound
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId

OPTIONS = PruneOptions(
    kinds=("neuron", "head"), joint=True, probes=2, measure=0, remove=0.5, exceed=0.5, confidence=0.5, effort="quick"
)
TERMS = [TermId("neuron", b, n) for b in range(6) for n in range(0, 1536, 9)] + [TermId("head", b, b) for b in range(6)]


def prompts(model: Any, count: int) -> list[Prompt]:
    return [Prompt("", str(k), token_ids(model, 7 + k, k), k) for k in range(count)]


def plan(removed: int, guaranteed: int) -> Any:
    return SimpleNamespace(granularity="neuron,head", removed=removed, guarantee=SimpleNamespace(removed=guaranteed))


def zeroed(model: Any, terms: list[TermId]) -> Any:
    """BERT without neurons and heads: the columns that read them are zero."""
    found = copy.deepcopy(model)
    size = model.config.hidden_size // model.config.num_attention_heads
    for term in terms:
        layer, k = found.encoder.layer[term.block], term.index
        assert k is not None
        if term.kind == "neuron":
            layer.output.dense.weight.data[:, k] = 0
        else:
            layer.attention.output.dense.weight.data[:, k * size : (k + 1) * size] = 0
    return found


@torch.no_grad()
def expected(model: Any, terms: list[TermId], texts: list[Prompt]) -> list[float]:
    without, found = zeroed(model, terms), []
    for one in texts:
        u, v = (m(input_ids=one.input_ids).last_hidden_state[0].double().mean(dim=0) for m in (model, without))
        found.append(float(u @ v / (u.norm() * v.norm())))
    return found


def test_it_is_that_of_the_embedder_with_zeros_in_its_weights() -> None:
    loaded = load(str(minilm()))
    given = prompts(loaded.model, 4)
    work = begin(loaded, given[:2], given[2:], OPTIONS, lambda *_: None).work
    nested = {"neuron,head": Nested(("neuron", "head"), TERMS, [], None)}
    rows, skipped = pooled_cosines(work, [plan(len(TERMS), 9)], nested, given[2:])
    assert [(row.granularity, row.removed, row.pooling) for row in rows] == [
        ("neuron,head", 9, "mean over tokens"), ("neuron,head", len(TERMS), "mean over tokens")
    ]  # fmt: skip
    assert skipped == []
    for row in rows:
        inside, outside = (expected(loaded.model, TERMS[: row.removed], some) for some in (given[:2], given[2:]))
        assert (row.mean, row.lowest) == pytest.approx((sum(inside) / 2, min(inside)), abs=1e-6)
        assert (row.held_out_mean, row.held_out_lowest) == pytest.approx((sum(outside) / 2, min(outside)), abs=1e-6)
    assert rows[1].lowest < rows[1].mean < 0.99 < rows[0].mean


def test_without_a_config_it_is_the_mean_and_said_so() -> None:
    loaded = as_loaded(single_model("bert").bert)
    report = prune_bound(loaded, prompts(loaded.model, 2), [], OPTIONS, lambda *_: None).report
    [row] = report.pooled
    assert row.removed == report.plans[0].removed
    assert "there is no 1_Pooling/config.json" in row.pooling
    assert (row.held_out_mean, row.held_out_lowest) == (None, None)
    assert row.reasons == dict.fromkeys(("held_out_mean", "held_out_lowest"), NO_HOLDOUT)


def test_where_it_has_no_sense_there_is_none() -> None:
    """A model with an LM head is no embedder; a repaired one is judged with its repair."""
    for model, options, why in (
        (single_model("bert"), replace(OPTIONS, metric="hidden"), []),
        (single_model("bert").bert, replace(OPTIONS, repair=True), [REPAIRED]),
    ):
        work = begin(as_loaded(model), prompts(model, 1), [], options, lambda *_: None).work
        rows, skipped = pooled_cosines(work, [plan(1, 0)], {}, [])
        assert (rows, [one.why for one in skipped]) == ([], why)


def test_weights_that_are_read_block_by_block_give_the_same(tmp_path: Path) -> None:
    single_model("bert").bert.save_pretrained(tmp_path)
    found = []
    with in_parts(tmp_path) as paged:
        for loaded in (paged, whole(tmp_path)):
            given = prompts(single_model("bert"), 3)
            work = begin(loaded, given[:2], given[2:], OPTIONS, lambda *_: None).work
            nested = {"neuron,head": Nested(("neuron", "head"), [TermId("neuron", b, 0) for b in (1, 2)], [], None)}
            [row], _ = pooled_cosines(work, [plan(2, 0)], nested, given[2:])
            found.append(row.model_dump(include={"mean", "lowest", "held_out_mean", "held_out_lowest"}))
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[0]["mean"] < 1 - 1e-6

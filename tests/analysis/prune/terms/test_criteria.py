"""Criteria in common use, against their definitions by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from torch import Tensor

from duat_cli.analysis.prune.terms import criteria
from duat_cli.analysis.prune.terms.criteria import Activations, WeightScores, block_scores
from duat_cli.analysis.prune.terms.damage import Loss
from duat_cli.analysis.prune.terms.readings import Readings
from duat_cli.analysis.prune.terms.responses import Responses, TermList
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.sweep.passes import record
from duat_cli.models.terms.sites import TermId, find_sites

KINDS = ("neuron", "head", "expert", "ffn", "attention", "block")


@functools.cache
def prepared(model_type: str) -> tuple[Any, Any, Any, Any, list[Tensor], Any]:
    model = single_model(model_type)
    structure = discover(model)
    sites = find_sites(structure)
    terms = TermList.of(structure, sites, KINDS)
    inputs = [token_ids(structure.stack, n, n) for n in (4, 7)]
    seen = Activations()
    for ids in inputs:
        record(structure, lambda ids=ids: run_stack(structure.stack, ids)[0], sites, seen.see)
    scores = WeightScores(structure, sites, terms, seen)
    for number in range(len(structure.calls)):
        scores.look(number)
    return model, structure, sites, terms, inputs, scores.found


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_scores_of_weights_by_hand(model_type: str) -> None:
    _, structure, sites, terms, inputs, scores = prepared(model_type)
    module = structure.calls[1]
    for kind, whole in (("neuron", "ffn"), ("head", "attention")):
        [site] = sites[module].of(kind)
        linear = site.module
        rows = (linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T).detach().double()
        seen: list[Tensor] = []
        handle = linear.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0][0].detach().double()))
        with torch.no_grad():
            for ids in inputs:
                run_stack(structure.stack, ids)
        handle.remove()
        x = torch.cat(seen)
        width = len(rows) // site.count
        for term, part in (
            (TermId(kind, 1, 2), slice(2 * width, 3 * width)),  # type: ignore[arg-type]
            (TermId(whole, 1, 0), slice(None)),  # type: ignore[arg-type]
        ):
            place = terms.ids.index(term)
            magnitude = float(rows[part].norm())
            wanda = float((rows[part].abs() * x[:, part].norm(dim=0)[:, None]).sum())
            assert float(scores["magnitude"][place]) == pytest.approx(magnitude, rel=1e-6)
            assert float(scores["activation x norm"][place]) == pytest.approx(
                float(x[:, part].norm()) * magnitude, rel=1e-5
            )
            assert float(scores["wanda"][place]) == pytest.approx(wanda, rel=1e-5)


def test_weights_in_pieces_score_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, whole = prepared("llama")
    monkeypatch.setattr(criteria, "ENTRIES", 50)
    *_, found = prepared.__wrapped__("llama")
    for name, scores in whole.items():
        assert torch.allclose(found[name], scores, rtol=1e-14, atol=0, equal_nan=True)


def test_what_is_not_defined_has_no_score() -> None:
    _, _, _, terms, _, scores = prepared("mixtral")
    for place, term in enumerate(terms.ids):
        assert bool(scores["wanda"][place].isfinite()) == (term.kind in ("head", "attention"))


def test_taylor_is_the_gradient_times_the_activation() -> None:
    model, structure, sites, terms, inputs, _ = prepared("llama")
    ids = inputs[1]
    loss = Loss(model)
    recorded = record(structure, loss.forward(ids))
    found = Responses(structure, sites, loss, ids, recorded, terms, 0, 0).alone()[0].double().abs()
    down = structure.calls[1].mlp.down_proj
    kept: list[Tensor] = []

    def keep(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        leaf = args[0].detach().requires_grad_()
        kept.append(leaf)
        return (leaf,)

    handle = down.register_forward_pre_hook(keep)
    with torch.enable_grad():
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    handle.remove()
    model.zero_grad()
    want = (kept[0].grad * kept[0]).sum(dim=(0, 1)).abs().double()  # type: ignore[operator]
    start = terms.starts["neuron", 1]
    assert torch.allclose(found[start : start + len(want)], want, rtol=1e-3, atol=1e-7)


def test_scores_of_blocks_are_means_over_prompts() -> None:
    _, _, _, terms, _, _ = prepared("llama")
    readings = [Readings(cosine={0: 0.9, 1: 0.5, 2: 0.2}, angle={0: 0.1, 1: 0.3, 2: 0.4}),
                Readings(cosine={0: 0.7, 1: 0.5, 2: 0.0}, angle={0: 0.3, 1: 0.3, 2: 0.5})]  # fmt: skip
    found = block_scores(terms, readings)
    blocks = terms.places("block")
    assert found["shortgpt"][blocks].tolist() == pytest.approx([0.2, 0.5, 0.9])
    assert found["angular"][blocks].tolist() == pytest.approx([0.2, 0.3, 0.45])
    assert bool(found["shortgpt"][: blocks.start].isnan().all())

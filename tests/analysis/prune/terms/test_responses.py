"""Responses against exact Jacobian products: differences of the model's own pass with a term scaled a little."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import first_two, single_model, token_ids, two_single
from removal import scaled
from torch import Tensor

import duat_cli
from duat_cli.analysis.prune.terms.ablation import mean_values
from duat_cli.analysis.prune.terms.damage import Divergence, Hidden, Loss, Metric
from duat_cli.analysis.prune.terms.responses import SEED, Responses, TermList, Without, noise
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models import budgets
from duat_cli.models.discovery.structure import ModelStructure, discover
from duat_cli.models.edits.surgery import zeroed
from duat_cli.models.sweep import gradients
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.sweep.passes import Recorded, record, removals
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.zoo.tiny import tiny_model

KINDS: tuple[Kind, ...] = ("neuron", "head", "expert", "ffn", "attention", "block")
TYPES = [
    "llama",
    "gpt2",
    "bert",
    "gemma2",
    "phi3",
    "falcon",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "albert",
    "gemma4_text",
]
PROBES = 6
STEPS = (1e-2, 2e-3, 5e-4)  # where the router is near a flip, or the model bends a lot, a smaller one


@functools.cache
def prepared(model_type: str) -> tuple[Any, ModelStructure, Any, Tensor]:
    model = single_model(model_type)
    structure = discover(model)
    return model, structure, find_sites(structure), token_ids(model)


def hidden(model_type: str, kinds: tuple[Kind, ...] = KINDS, count: int = PROBES) -> tuple[TermList, Tensor]:
    _, structure, sites, ids = prepared(model_type)
    metric = Hidden(structure)
    recorded = record(structure, metric.forward(ids))
    terms = TermList.of(structure, sites, kinds)
    return terms, Responses(structure, sites, metric, ids, recorded, terms, count, 0).alone()


def slope(structure: ModelStructure, sites: Any, metric: Metric, ids: Tensor, term: TermId, step: float) -> Tensor:
    """J · term: how fast the output moves as the term is scaled, by a central difference."""
    more, less = (scaled(structure, sites, metric.forward(ids), term, 1 + s).double() for s in (step, -step))
    return (more - less) / (2 * step)


def some_terms(terms: TermList) -> list[TermId]:
    """Of every kind the first in the first block, one in the middle, and the last in the last block."""
    blocks = sorted({t.block for t in terms.ids})
    found = []
    for kind in KINDS:
        for block, share in ((blocks[0], 0.0), (blocks[len(blocks) // 2], 0.5), (blocks[-1], 1.0)):
            here = [t for t in terms.ids if t.kind == kind and t.block == block]
            found += [here[int(share * (len(here) - 1))]] if here else []
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("model_type", TYPES)
def test_responses_are_exact_jacobian_products(model_type: str) -> None:
    _, structure, sites, ids = prepared(model_type)
    metric = Hidden(structure)
    recorded = record(structure, metric.forward(ids))
    terms, found = hidden(model_type)
    generator = torch.Generator().manual_seed(SEED)
    probes = metric.probes(recorded.output, ids, lambda shape: noise(shape, generator), PROBES)
    checked = 0
    for term in some_terms(terms):
        got = found[:, terms.ids.index(term)].double()
        wanted = (probes.double().flatten(1) @ slope(structure, sites, metric, ids, term, s).flatten() for s in STEPS)
        assert any(float((got - want).norm()) / max(float(want.norm()), 1e-2) < 1e-2 for want in wanted), term
        checked += float(got.norm()) > 1e-3
    assert checked > 5


@pytest.mark.parametrize("model_type", ["llama", "bert", "falcon", "qwen3_moe", "gemma2"])
def test_a_response_does_not_depend_on_what_else_is_asked_for(model_type: str) -> None:
    terms, together = hidden(model_type)
    for kind in KINDS:
        alone, found = hidden(model_type, (kind,))
        here = together[:, terms.places(kind)]
        assert [terms.ids[k] for k in terms.places(kind)] == alone.ids
        assert torch.allclose(here, found, rtol=1e-5, atol=1e-7), kind


@pytest.mark.parametrize("model_type", ["llama", "falcon", "mixtral"])
def test_a_response_does_not_depend_on_how_many_probes_fit(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, together = hidden(model_type)
    monkeypatch.setattr(gradients, "GRADIENT_BYTES", 1)
    _, singly = hidden(model_type)
    assert torch.allclose(together, singly, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limit", ["PROBE_ELEMENTS", "PULLED_ELEMENTS"])
def test_pieces_of_probes_are_all_there(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nll has a direction of first order, which is carried once whatever the number of pieces."""
    model, structure, sites, ids = prepared("llama")
    metric = Loss(model)
    recorded = record(structure, metric.forward(ids))
    terms = TermList.of(structure, sites, ("head",))
    whole = Responses(structure, sites, metric, ids, recorded, terms, 5, 0).alone()
    size = recorded.output.numel() if limit == "PROBE_ELEMENTS" else recorded.calls[-1].after.numel()
    monkeypatch.setattr(budgets, limit, 2 * size)
    pieces = Responses(structure, sites, metric, ids, recorded, terms, 5, 0)
    found = pieces.alone()
    assert len(pieces.pieces) == (1 if limit == "PROBE_ELEMENTS" else 3)
    assert whole.shape == found.shape == (6, 12)
    assert torch.allclose(whole, found, rtol=1e-5, atol=1e-8)
    first = Responses(structure, sites, metric, ids, recorded, terms, 0, 0).alone()
    assert torch.allclose(first[0], whole[0], rtol=1e-5, atol=1e-8)
    assert len(first) == 1


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "falcon"])
def test_parts_add_up_to_the_whole(model_type: str) -> None:
    """Heads to attention and neurons to FFN, but for the layer's bias."""
    _, structure, sites, ids = prepared(model_type)
    metric = Hidden(structure)
    recorded = record(structure, metric.forward(ids))
    terms, found = hidden(model_type)
    for block in range(len(structure.calls)):
        for part, whole in (("head", "attention"), ("neuron", "ffn")):
            parts = [k for k, t in enumerate(terms.ids) if t.kind == part and t.block == block]
            [place] = [k for k, t in enumerate(terms.ids) if t.kind == whole and t.block == block]
            [site] = sites[structure.calls[block]].of(whole)  # type: ignore[arg-type]
            [inner] = sites[structure.calls[block]].of(part)  # type: ignore[arg-type]
            bias = getattr(inner.module, "bias", None)
            of_bias = 0.0 if bias is None else bias_response(structure, sites, metric, ids, recorded, block, site, bias)
            total = found[:, parts].sum(dim=1) + of_bias
            assert torch.allclose(total, found[:, place], rtol=1e-3, atol=1e-5), (block, part)


def bias_response(
    structure: ModelStructure, sites: Any, metric: Metric, ids: Tensor, recorded: Recorded, block: int, site: Any,
    bias: Tensor,
) -> Tensor:  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    probes = metric.probes(recorded.output, ids, lambda shape: noise(shape, generator), PROBES)
    walk = gradients.Backward(structure, sites, metric.forward(ids), recorded, lambda: probes.split(2))
    one_by_one([walk])
    for number in reversed(range(len(recorded.calls))):
        for found in walk.through(number):
            for at in found.sites:
                if number == block and at.site == site:
                    return (at.gradient * bias.detach()).flatten(1).sum(dim=1)
    raise AssertionError("no such site")


def test_a_parallel_block_is_its_attention_and_its_ffn() -> None:
    """Both read the block's input, so that x + a + f is all there is."""
    terms, found = hidden("falcon", ("ffn", "attention", "block"))
    ffn, attention, block = (found[:, terms.places(kind)] for kind in ("ffn", "attention", "block"))
    assert torch.allclose(ffn + attention, block, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_the_interval_holds_the_exact_length_as_often_as_it_says(model_type: str) -> None:
    """‖J t‖ exactly, from every direction of the output; 32 probes say where it lies with 90 % confidence."""
    _, structure, sites, ids = prepared(model_type)
    metric = Hidden(structure)
    recorded = record(structure, metric.forward(ids))
    terms = TermList.of(structure, sites, ("neuron", "head"))
    size = recorded.output.numel()
    basis = torch.eye(size).reshape(size, *recorded.output.shape) / recorded.output.norm()

    class Every(Hidden):
        def probes(self, reference: Tensor, given: Any, noise: Any, count: int) -> Tensor:
            return basis

    drawn = Responses(structure, sites, Every(structure), ids, recorded, terms, size, 0).alone()
    exact = drawn.double().square().sum(0).sqrt()
    held, ratio, rounds = 0.0, 0.0, 20
    for seed in range(rounds):
        drawn = Responses(structure, sites, metric, ids, recorded, terms, 32, seed).alone()
        estimate, low, high = metric.predicted(drawn[None], 0.9)
        held += float(((low <= exact) & (exact <= high)).double().mean()) / rounds
        ratio += float((estimate / exact).mean()) / rounds
    assert 0.85 <= held <= 0.95
    assert ratio == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("metric_name", ["kl", "nll"])
def test_small_terms_do_the_damage_that_is_predicted(metric_name: str) -> None:
    """Weights of the last block's output layers made small: then the second order is all there is."""
    model = two_single("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 0.02
    structure = discover(model)
    sites = find_sites(structure)
    ids = token_ids(model)
    metric: Any = Divergence(model) if metric_name == "kl" else Loss(model)
    recorded = record(structure, metric.forward(ids))
    terms = TermList.of(structure, sites, ("neuron",))
    found = Responses(structure, sites, metric, ids, recorded, terms, 3000, 0).alone()
    estimate, _, _ = metric.predicted(found[None], 0.95)
    for index in (48, 62, 95):
        measured = metric.measured(
            recorded.output, scaled(structure, sites, metric.forward(ids), terms.ids[index], 0.0), ids
        )
        assert float(estimate[index]) == pytest.approx(measured, rel=0.1, abs=2e-10), index


def test_with_means_the_deviation_is_what_counts() -> None:
    """Responses with means are those of the term less those of its mean."""
    _, structure, sites, ids = prepared("llama")
    metric = Hidden(structure)
    recorded = record(structure, metric.forward(ids))
    terms = TermList.of(structure, sites, ("neuron", "head", "ffn", "attention", "block"))
    means = mean_values(structure, sites, metric, [ids])
    plain = Responses(structure, sites, metric, ids, recorded, terms, PROBES, 0).alone()
    zero = {key: torch.zeros_like(value) for key, value in means.items()}
    assert torch.equal(Responses(structure, sites, metric, ids, recorded, terms, PROBES, 0, zero).alone(), plain)
    apart = Responses(structure, sites, metric, ids, recorded, terms, PROBES, 0, means).alone()
    term = TermId("neuron", 1, 5)
    place = terms.ids.index(term)
    site, _ = sites[structure.calls[1]].find(term)

    def shifted(step: float) -> Tensor:
        """The model's own pass, the neuron moved a little towards its mean."""

        def move(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            edited = args[0].clone()
            edited[..., 5] += step * (edited[..., 5] - means[1, site][5])
            return (edited,)

        handle = site.module.register_forward_pre_hook(move)
        with torch.no_grad():
            output = metric.forward(ids)().double()
        handle.remove()
        return output

    generator = torch.Generator().manual_seed(SEED)
    probes = metric.probes(recorded.output, ids, lambda shape: noise(shape, generator), PROBES).double()
    want = probes.flatten(1) @ ((shifted(1e-2) - shifted(-1e-2)) / 2e-2).flatten()
    assert torch.allclose(apart[:, place].double(), want, rtol=1e-2, atol=1e-5)
    assert not torch.allclose(apart[:, place], plain[:, place], rtol=1e-2)


def test_bfloat16_responses_are_near_those_of_float32() -> None:
    wide_terms, wide_found = hidden("llama", count=32)
    model = single_model("llama").bfloat16()
    structure = discover(model)
    sites = find_sites(structure)
    ids = token_ids(model)
    metric = Hidden(structure)
    terms = TermList.of(structure, sites, KINDS)
    found = Responses(structure, sites, metric, ids, record(structure, metric.forward(ids)), terms, 32, 0).alone()
    assert terms.ids == wide_terms.ids
    narrow, broad = (metric.predicted(x[None], 0.95)[0] for x in (found, wide_found))
    assert float(((narrow / broad).log().abs()).quantile(0.9)) < 0.1


# -- where something is gone already -------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("name", ["kl", "hidden", "nll"])
def test_responses_without_terms_are_those_of_a_model_whose_weights_are_zero_there(model_type: str, name: str) -> None:
    """By hooks against weights; and the first response is the slope of the real damage, by differences."""
    model, structure, sites, ids = prepared(model_type)
    metric: Metric = {"kl": Divergence(model), "hidden": Hidden(structure), "nll": Loss(model)}[name]
    kinds: tuple[Kind, ...] = ("neuron", "head", "expert") if model_type == "mixtral" else ("neuron", "head", "ffn")
    terms = TermList.of(structure, sites, kinds)
    gone = [TermId("head", 0, 1), TermId("head", 1, 2), TermId("head", 2, 0)]
    dense = record(structure, metric.forward(ids)).output
    without = Without(removals(structure, sites, gone), dense)
    hooked = record(structure, metric.forward(ids), gone=without.gone)
    found = Responses(structure, sites, metric, ids, hooked, terms, PROBES, 0, without=without).alone()
    with zeroed(model, structure, sites, gone):
        plain = record(structure, metric.forward(ids))
        again = Responses(structure, sites, metric, ids, plain, terms, PROBES, 0, without=Without({}, dense)).alone()
        start = metric.measured(dense, plain.output, ids)
        for term in [one for one in some_terms(terms) if one not in gone][:4]:
            more, less = (
                metric.measured(dense, scaled(structure, sites, metric.forward(ids), term, 1 + s), ids)
                for s in (2e-2, -2e-2)
            )
            slope = (more**2 - less**2) / 2 if name == "hidden" else more - less
            assert float(found[0, terms.ids.index(term)]) == pytest.approx(slope / 4e-2, rel=0.03, abs=2e-5)
    assert torch.allclose(hooked.output, plain.output, atol=1e-5)
    assert len(found) == 1 + PROBES
    assert float((found - again).norm() / again.norm()) < 1e-4
    places = [terms.ids.index(term) for term in gone]
    assert not found[:, places].any()
    nothing = metric.of_moved(torch.zeros(1 + PROBES, 1), start)
    assert float(nothing) == pytest.approx(start, rel=1e-6)


def test_a_block_that_is_gone_has_no_response_and_passes_the_others_on() -> None:
    _, structure, sites, ids = prepared("llama")
    metric = Hidden(structure)
    terms = TermList.of(structure, sites, ("block", "head"))
    dense = record(structure, metric.forward(ids)).output
    without = Without(removals(structure, sites, [TermId("block", 1)]), dense)
    recorded = record(structure, metric.forward(ids), gone=without.gone)
    found = Responses(structure, sites, metric, ids, recorded, terms, PROBES, 0, without=without).alone()
    here = [k for k, term in enumerate(terms.ids) if term.block == 1]
    assert not found[:, here].any()
    assert torch.equal(recorded.calls[2].before, recorded.calls[0].after)
    term = TermId("head", 0, 1)
    more, less = (
        metric.measured(dense, run_scaled(structure, sites, metric.forward(ids), term, 1 + s), ids)
        for s in (2e-2, -2e-2)
    )
    assert float(found[0, terms.ids.index(term)]) == pytest.approx((more**2 - less**2) / 8e-2, rel=0.03)


def run_scaled(structure: ModelStructure, sites: Any, forward: Any, term: TermId, factor: float) -> Tensor:
    """The output with block 1 skipped by hand and a term scaled."""
    block = structure.calls[1]
    own, block.forward = block.forward, lambda hidden, *args, **kwargs: hidden
    try:
        return scaled(structure, sites, forward, term, factor)
    finally:
        block.forward = own


def test_gradients_that_are_no_numbers_are_refused() -> None:
    """Longformer's own, in float64, where a window is not full."""
    model = first_two(tiny_model("longformer")).double()
    with pytest.raises(UnsupportedModelError, match="not finite in float64"):
        duat_cli.prune_bound(model, prompts=[[41, 52, 63, 41, 52, 74, 41, 41, 60]], effort="quick", measure=0)

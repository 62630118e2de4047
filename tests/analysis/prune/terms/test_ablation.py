"""Ablation: what is removed, with what in its place, and that nothing unmeasured passes for small."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from classifiers import KINDS, classifier
from helpers import single_model, token_ids
from removal import OWN, weights_zeroed
from torch import Tensor

from duat_cli.analysis.prune.terms.ablation import Ablator, Effect, effects_of, mean_values
from duat_cli.analysis.prune.terms.damage import Hidden, metric_for
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.terms.sites import TermId, find_sites


@functools.cache
def prepared(model_type: str) -> tuple[Any, ModelStructure, Any]:
    model = single_model(model_type)
    structure = discover(model)
    return model, structure, find_sites(structure)


def prompts_of(model: Any, *lengths: int) -> list[Prompt]:
    return [Prompt("", str(k), token_ids(model, n, k), k) for k, n in enumerate(lengths)]


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt_oss"])
def test_damage_is_that_of_the_model_with_its_weights_at_zero(model_type: str) -> None:
    model, structure, sites = prepared(model_type)
    metric = metric_for(None, model, structure)
    assert metric.name == "kl"
    ablator = Ablator(structure, sites, metric)
    prompts = prompts_of(model, 5, 9)
    sets = [[TermId("head", 1, 2)], [TermId("ffn", 0, 0), TermId("head", 2, 0), TermId("head", 2, 3)]]
    ticks: list[tuple[int, int]] = []
    found = effects_of(ablator, prompts, sets, lambda *at: ticks.append(at))
    assert [len(row) for row in found] == [2, 2]
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for k, terms in enumerate(sets):
        for p, prompt in enumerate(prompts):
            with torch.no_grad():
                before = model(input_ids=prompt.input_ids).logits
                with weights_zeroed(model, OWN[model_type], terms):
                    after = model(input_ids=prompt.input_ids).logits
            a, b = before[0].double().log_softmax(-1), after[0].double().log_softmax(-1)
            want = float((a.exp() * (a - b)).sum(-1).mean())
            assert found[p][k].damage == pytest.approx(want, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_a_classifier_is_that_of_its_classes(kind: str) -> None:
    """Without a padding token transformers refuses several texts at once: each set then has a pass of its own."""
    model = classifier(kind)
    structure = discover(model)
    ablator = Ablator(structure, find_sites(structure), metric_for(None, model, structure))
    sets = [[TermId("head", 1, 2)], [TermId("ffn", 0, 0)], [TermId("neuron", 1, 3), TermId("head", 0, 0)]]
    [prompt] = prompts_of(model, 9)
    found = effects_of(ablator, [prompt], sets, lambda *_: None)[0]
    assert ablator.rows.apart is (kind != "last")
    own = OWN["llama"] if kind == "last" else OWN["bert"]
    for terms, effect in zip(sets, found, strict=True):
        with torch.no_grad():
            before = model(input_ids=prompt.input_ids).logits.double().log_softmax(-1)
            with weights_zeroed(model, own, terms):
                after = model(input_ids=prompt.input_ids).logits.double().log_softmax(-1)
        assert effect.damage == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-4)


def test_nothing_removed_does_no_damage() -> None:
    model, structure, sites = prepared("llama")
    ablator = Ablator(structure, sites, Hidden(structure))
    assert effects_of(ablator, prompts_of(model, 6), [[]], lambda *_: None) == [[Effect(0.0, 0.0)]]


@pytest.mark.parametrize("model_type", ["llama", "albert", "gemma2"])
def test_means_are_over_all_tokens_of_all_prompts(model_type: str) -> None:
    _, structure, sites = prepared(model_type)
    prompts = prompts_of(structure.stack, 4, 9)
    means = mean_values(structure, sites, Hidden(structure), [p.input_ids for p in prompts])
    site = sites[structure.calls[1]].of("neuron")[0]
    seen: list[Tensor] = []
    handle = site.module.register_forward_pre_hook(lambda m, a: seen.append(a[0].clone()))
    per_call: list[Tensor] = []
    for prompt in prompts:
        seen.clear()
        with torch.no_grad():
            run_stack(structure.stack, prompt.input_ids)
        per_call.append(seen[1 if model_type == "albert" else 0][0].double())
    handle.remove()
    assert torch.allclose(means[1, site], torch.cat(per_call).mean(dim=0), atol=1e-6)
    assert {key[0] for key in means} == set(range(len(structure.calls)))
    assert all(value.ndim == 1 for value in means.values())


def test_means_of_convolutions_are_over_tokens_as_well() -> None:
    """Some of its FFNs give (1, width, 1, tokens); prompts of different lengths have one mean."""
    _, structure, sites = prepared("sam3_lite_text_text_model")
    metric, prompts = Hidden(structure), prompts_of(structure.stack, 9, 6)
    means = mean_values(structure, sites, metric, [prompt.input_ids for prompt in prompts])
    checked = 0
    for block, module in enumerate(structure.calls):
        [site] = sites[module].of("ffn")
        seen: list[Tensor] = []
        with site.watched.register_forward_hook(lambda m, a, o, seen=seen: seen.append(o)), torch.no_grad():
            for prompt in prompts:
                metric.forward(prompt.input_ids)()
        if seen[0].ndim < 4:
            continue
        rows = torch.cat([value[0, :, 0].T for value in seen])  # (tokens, width)
        mean = rows.mean(dim=0)
        assert torch.allclose(means[block, site].flatten(), mean.double(), atol=1e-6)
        with torch.no_grad():
            before = metric.forward(prompts[0].input_ids)()
            with site.watched.register_forward_hook(lambda m, a, o, mean=mean: mean[None, :, None, None].expand_as(o)):
                after = metric.forward(prompts[0].input_ids)()
        ablator = Ablator(structure, sites, metric, means)
        [[got]] = effects_of(ablator, prompts[:1], [[TermId("ffn", block, 0)]], lambda *_: None)
        assert got.damage == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
        checked += 1
    assert checked == 2


def test_mean_ablation_sets_the_term_to_its_mean() -> None:
    """A neuron by a change of the down projection's bias, by hand."""
    model, structure, sites = prepared("gpt2")
    metric = Hidden(structure)
    [prompt] = prompts_of(model, 8)
    means = mean_values(structure, sites, metric, [prompt.input_ids])
    site = sites[structure.calls[1]].of("neuron")[0]
    got = effects_of(Ablator(structure, sites, metric, means), [prompt], [[TermId("neuron", 1, 7)]], lambda *_: None)
    down = site.module
    kept = down.weight.detach().clone(), down.bias.detach().clone()
    with torch.no_grad():
        before = metric.forward(prompt.input_ids)()
        down.bias += (means[1, site][7] * down.weight[7]).float()
        down.weight[7] = 0
        after = metric.forward(prompt.input_ids)()
        down.weight.copy_(kept[0])
        down.bias.copy_(kept[1])
    want = float((after.double() - before.double()).norm() / before.double().norm())
    assert want > 1e-4
    assert got[0][0].damage == pytest.approx(want, rel=1e-3)


def test_mean_ablation_of_a_block_with_one_token_is_nothing() -> None:
    """The mean over one token is that token: everything stays."""
    model, structure, sites = prepared("llama")
    [prompt] = prompts_of(model, 1)
    metric = Hidden(structure)
    means = mean_values(structure, sites, metric, [prompt.input_ids])
    ablator = Ablator(structure, sites, metric, means)
    sets = [[TermId("block", 1)], [TermId("head", 0, 1)], [TermId("ffn", 2, 0)], [TermId("neuron", 1, 3)]]
    [effects] = effects_of(ablator, [prompt], sets, lambda *_: None)
    assert max(one.damage for one in effects) < 1e-5


def test_a_module_that_runs_twice_in_a_block_counts_every_token_once() -> None:
    """Tokens seen, not tokens of the prompt, are what a mean is over."""
    _, structure, sites = prepared("llama")
    site = sites[structure.calls[0]].of("neuron")[0]
    ids = token_ids(structure.stack, 6)
    plain = mean_values(structure, sites, Hidden(structure), [ids])
    block, running = structure.calls[0], [False]

    def again(module: Any, args: Any, output: Tensor) -> None:
        if not running[0]:
            running[0] = True
            module(*args)
            running[0] = False

    handle = block.mlp.register_forward_hook(again)
    try:
        twice = mean_values(structure, sites, Hidden(structure), [ids])
    finally:
        handle.remove()
    assert torch.allclose(plain[0, site], twice[0, site], atol=1e-9)


def test_an_output_that_is_not_finite_is_no_damage_at_all() -> None:
    """NaN is above no budget: it must not pass for harmless."""
    model, structure, sites = prepared("llama")
    metric = Hidden(structure)
    ablator = Ablator(structure, sites, metric)
    [prompt] = prompts_of(model, 5)
    recorded = ablator.record(prompt.input_ids)
    removals = ablator.removals([TermId("head", 2, 0)])
    handle = model.model.norm.register_forward_hook(lambda m, a, out: out * torch.nan)
    try:
        with pytest.raises(UnsupportedModelError, match=r"block 2 removed, .* not finite in float32"):
            ablator.damage(recorded, prompt.input_ids, removals)
    finally:
        handle.remove()


def test_sets_side_by_side_are_those_one_after_the_other() -> None:
    model, structure, sites = prepared("llama")
    for name in ("kl", "hidden", "nll"):
        ablator = Ablator(structure, sites, metric_for(name, model, structure))  # type: ignore[arg-type]
        [prompt] = prompts_of(model, 9)
        gone = [ablator.removals([TermId("head", k % 3, k // 3)]) for k in range(9)]
        recorded = ablator.record(prompt.input_ids)
        done: list[int] = []
        effects = ablator.effects(recorded, prompt.input_ids, gone, lambda done=done: done.append(1))
        found = [one.damage for one in effects]
        alone = [ablator.damage(recorded, prompt.input_ids, one) for one in gone]
        assert found == pytest.approx(alone, rel=1e-3, abs=1e-7)
        assert len(done) == 9
        assert ablator.rows.apart


def test_a_model_whose_rows_see_each_other_is_ablated_row_by_row() -> None:
    """A block that takes its mean over the whole batch, as experts with room for so many tokens of a batch would."""
    model, structure, sites = prepared("llama")
    ablator = Ablator(structure, sites, Hidden(structure))
    [prompt] = prompts_of(model, 9)
    layer = sites[structure.calls[1]].of("ffn")[0].module
    handle = layer.register_forward_hook(lambda _module, _args, output: output + output.mean())
    try:
        gone = [ablator.removals([TermId("head", 0, k)]) for k in range(3)]
        recorded = ablator.record(prompt.input_ids)
        found = [one.damage for one in ablator.effects(recorded, prompt.input_ids, gone)]
        assert ablator.rows.apart is False
        assert found == [ablator.damage(recorded, prompt.input_ids, one) for one in gone]
    finally:
        handle.remove()


def test_rows_of_one_pass_that_cannot_be_told_apart_count_whatever_ends_later() -> None:
    """Side by side, the check of other rows may come to its end behind them."""
    model, structure, sites = prepared("llama")
    ablator = Ablator(structure, sites, Hidden(structure))
    [prompt] = prompts_of(model, 9)
    [site] = sites[structure.calls[2]].of("ffn")
    gone = [ablator.removals([TermId(kind, block, 0)]) for kind, block in (("head", 0), ("ffn", 2)) for _ in range(2)]
    recorded = ablator.record(prompt.input_ids)
    found = ablator.ablations(recorded, prompt.input_ids, gone)
    rows, check, refused = found.passes
    one_by_one([rows])
    handle = site.watched.register_forward_hook(lambda _module, _args, output: output.reshape(1, -1, output.shape[-1]))
    try:
        one_by_one([refused])
    finally:
        handle.remove()
    one_by_one([check])
    assert not ablator.settled([found])
    assert not ablator.ablations(recorded, prompt.input_ids, gone).in_rows

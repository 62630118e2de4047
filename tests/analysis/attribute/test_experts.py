"""Experts and the neurons inside them, against the tiny model's own weights in float64, and as parts of each other."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from attributing import double, lost, report_of
from helpers import token_ids
from torch import Tensor

from duat_cli.models.instrument.rig import BlockRun
from duat_cli.results.attribute import Attribution, InnerPart

ALL = 100_000


def contribution(model: Any, run: BlockRun, expert: int, neuron: int | None) -> Tensor:
    """What one neuron of an expert of mixtral (None: the expert) adds to each token, (N, M), from the weights."""
    mlp = run.parts.module.mlp
    z = run.units[0].input.flatten(0, -2)
    probabilities = (z @ mlp.gate.weight.T).softmax(-1)
    best, chosen = probabilities.topk(model.config.num_experts_per_tok)
    weights = torch.where(chosen == expert, best / best.sum(-1, keepdim=True), 0).sum(-1, keepdim=True)
    gate, up = (z @ mlp.experts.gate_up_proj[expert].T).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    if neuron is not None:
        hidden = hidden * torch.eye(hidden.shape[1], dtype=z.dtype)[neuron]
    return weights * (hidden @ mlp.experts.down_proj[expert].T)


def straight(model: Any, ids: Tensor, one: Attribution, added: Tensor) -> float:
    """What vectors on the stream, (N, M), write to the logit through the last norm with its scale held."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    assert one.position is not None
    assert one.target.token is not None
    x, norm = seen[0][one.position], model.model.norm
    scale = torch.rsqrt(x.square().mean() + norm.variance_epsilon)
    return float((added[one.position] * scale * norm.weight) @ model.lm_head.weight[one.target.token.id])


@torch.no_grad()
def test_both_readings_of_a_neuron_in_an_expert_are_those_of_its_weights() -> None:
    model = double("mixtral")
    ids = token_ids(model, tokens=6)
    (one,) = report_of(model, ids, target="t77", top=12).attribution
    assert len(one.parts.neurons) == len(one.direct.neurons) == 12
    inner = [one.parts.neurons[0], one.parts.neurons[11], one.direct.neurons[0], *one.parts.experts[:2]]
    assert all((part.expert is None) is (part in one.parts.experts) for part in inner)
    assert {part.block for part in inner} != {2}  # some of them have blocks behind them
    for part in inner:
        expert, neuron = (part.index, None) if part.expert is None else (part.expert, part.index)
        added: list[Tensor] = []

        def without_it(block: int, run: BlockRun, given: list[Tensor], part: InnerPart = part, expert: int = expert,
                       neuron: int | None = neuron, added: list[Tensor] = added) -> None:  # fmt: skip
            if block == part.block:
                added.append(contribution(model, run, expert, neuron))
                given[part.unit] -= added[0].reshape(given[part.unit].shape)

        assert lost(model, ids, one, without_it) == pytest.approx(part.value, rel=1e-6, abs=1e-9)
        assert straight(model, ids, one, added[0]) == pytest.approx(part.direct, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen2_moe", "deepseek_v3"])
def test_neurons_add_up_to_their_expert_and_experts_to_their_unit(model_type: str) -> None:
    model = double(model_type)
    (one,) = report_of(model, token_ids(model, tokens=7), target="t77", top=ALL).attribution
    assert one.parts.experts
    inside: defaultdict[tuple[int, int, int], list[InnerPart]] = defaultdict(list)
    for neuron in one.parts.neurons:
        if neuron.expert is not None:
            inside[neuron.block, neuron.unit, neuron.expert].append(neuron)
    whole: defaultdict[tuple[int, int], list[InnerPart]] = defaultdict(list)
    for expert in one.parts.experts:
        neurons = inside[expert.block, expert.unit, expert.index]
        assert len({neuron.index for neuron in neurons}) == len(neurons) > 1
        for reading in ("value", "direct"):
            together = math.fsum(getattr(neuron, reading) for neuron in neurons)
            assert together == pytest.approx(getattr(expert, reading), rel=1e-9, abs=1e-12)
        whole[expert.block, expert.unit].append(expert)
    if model_type in ("mixtral", "olmoe"):  # the others have a shared expert beside the routed ones
        direct = {(unit.block, unit.unit): unit.value for unit in one.direct.units}
        for unit in one.parts.units:
            parts = whole[unit.block, unit.unit]
            assert math.fsum(part.value for part in parts) == pytest.approx(unit.value, rel=1e-9, abs=1e-12)
            written = math.fsum(part.direct for part in parts)
            assert written == pytest.approx(direct[unit.block, unit.unit], rel=1e-9, abs=1e-12)


def test_equal_parts_stand_as_in_the_model() -> None:
    """Of experts that no token before the target chose the last position, all write exactly nothing straight to it."""
    model = double("mixtral")
    (one,) = report_of(model, token_ids(model, tokens=6), top=ALL).attribution
    nothing = [(part.block, part.unit, part.index) for part in one.direct.experts if part.direct == 0]
    assert len(nothing) >= 4
    assert nothing == sorted(nothing)


def test_experts_of_another_form_have_no_neurons() -> None:
    """gpt-oss cuts its activations off: its experts are told apart, their neurons are not."""
    model = double("gpt_oss")
    (one,) = report_of(model, token_ids(model, tokens=7), target="t77", top=ALL).attribution
    assert one.parts.experts
    assert [neuron for neuron in one.parts.neurons if neuron.expert is not None] == []


def test_a_form_that_does_not_add_up_gives_no_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    from duat_cli.models.terms.experts import ExpertForm

    plain = ExpertForm.activations
    monkeypatch.setattr("duat_cli.models.terms.experts._gives", lambda *_: True)
    monkeypatch.setattr(ExpertForm, "activations", lambda self, expert, z: 1.01 * plain(self, expert, z))
    model = double("mixtral")
    (one,) = report_of(model, token_ids(model, tokens=7), target="t77").attribution
    assert one.parts.experts
    assert one.parts.neurons == []

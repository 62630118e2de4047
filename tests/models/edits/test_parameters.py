"""What a term holds, counted by hand in the layers of the model."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import single_model
from pruning import parameters_of

from duat_cli.models.discovery.structure import discover
from duat_cli.models.edits.heads import HeadLayers
from duat_cli.models.terms.sites import find_sites


def numbers(*modules: Any) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def test_of_llama() -> None:
    """Two query heads share a key and value head; no biases, so that all of attention is heads' and all of the FFN
    neurons'."""
    model = single_model("llama")
    structure = discover(model)
    found = parameters_of(structure, find_sites(structure))
    for layer in model.model.layers:
        each, block = found[layer].each, found[layer]
        config = model.config
        assert each["neuron"].tolist() == [numbers(layer.mlp) / config.intermediate_size] * config.intermediate_size
        assert each["head"].tolist() == [numbers(layer.self_attn) / 4] * 4
        assert (each["ffn"].tolist(), each["attention"].tolist()) == (
            [float(numbers(layer.mlp))], [float(numbers(layer.self_attn))]
        )  # fmt: skip
        assert each["block"].tolist() == [float(numbers(layer))]
        assert block.neurons is not None
        assert (block.group, block.neurons.each) == (2, each["neuron"][0])
        assert isinstance(block.heads, HeadLayers)
        assert block.heads.each == numbers(layer.self_attn) / 2


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_biases_of_the_last_layers_stay(model_type: str) -> None:
    """A neuron has a row, a bias and a column."""
    model = single_model(model_type)
    structure = discover(model)
    for block in parameters_of(structure, find_sites(structure)).values():
        width = structure.hidden_size
        assert set(block.each["neuron"].tolist()) == {2.0 * width + 1}
        assert block.group == 1


def test_heads_of_a_mixer_without_softmax_share_no_keys_and_values() -> None:
    model = single_model("minimax")
    structure = discover(model)
    found = parameters_of(structure, find_sites(structure))
    groups = [found[layer].group for layer in model.model.layers]
    kinds = model.config.layer_types
    assert groups == [2 if kind == "full_attention" else 1 for kind in kinds]
    assert len(set(groups)) == 2


def test_of_routed_experts() -> None:
    model = single_model("mixtral")
    structure = discover(model)
    found = parameters_of(structure, find_sites(structure))
    experts = model.model.layers[0].mlp.experts
    assert set(found[model.model.layers[0]].each["expert"].tolist()) == {numbers(experts) / experts.num_experts}

"""Which layers can be refitted, and why others are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model
from torch import Tensor, nn

from duat_cli.analysis.prune.repair.consumers import EXPERTS, consumers
from duat_cli.models.discovery.structure import discover
from duat_cli.models.sweep.passes import removals
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.zoo import tiny


def found(model: Any) -> Any:
    structure = discover(model)
    sites = find_sites(structure)
    return *consumers(model, structure, sites), structure, sites


@pytest.mark.parametrize(("model_type", "arrives"), [("llama", True), ("gpt2", True), ("gemma2", False)])
def test_the_layers_of_every_block_in_the_order_in_which_they_run(model_type: str, arrives: bool) -> None:
    model = single_model(model_type)
    layers, left, _, _ = found(model)
    names = {module: name for name, module in model.named_modules()}
    assert not left
    assert len(layers) == 3
    for own in layers.values():
        attention, ffn = (names[one.site.module].rpartition(".")[2] for one in own)
        assert (attention, ffn) in (("o_proj", "down_proj"), ("c_proj", "c_proj"))
        assert [one.arrives for one in own] == [False, arrives]
        assert all((one.bias is not None) == (model_type == "gpt2") for one in own)
        assert [one.width for one in own] == [one.weight.shape[int(model_type != "gpt2")] for one in own]


def test_what_stays_of_a_layer_and_what_becomes_of_its_weights() -> None:
    model = single_model("gpt2")
    layers, _, structure, sites = found(model)
    gone = removals(structure, sites, [TermId("head", 0, 1), TermId("neuron", 0, 4), TermId("ffn", 1, 0)])
    attention, ffn = layers[0]
    width = attention.width // attention.site.count
    heads = [k for k in range(attention.width) if not width <= k < 2 * width]
    assert attention.kept(gone[0]).tolist() == heads
    assert ffn.kept(gone[0]).tolist() == [k for k in range(ffn.width) if k != 4]
    assert ffn.kept(None).tolist() == list(range(ffn.width))
    assert [one.silent(gone[0]) for one in layers[0]] == [False, False]
    assert [one.silent(gone[1]) for one in layers[1]] == [False, True]
    change = torch.ones(len(heads) + 1, ffn.weight.shape[1], dtype=torch.float64)
    values = attention.changed(change, attention.kept(gone[0]), torch.float32)
    expected = attention.weight + 1
    expected[width : 2 * width] = 0  # Conv1D: inputs are rows
    assert torch.allclose(values[attention.weight], expected)
    assert torch.allclose(values[attention.bias], attention.bias + 1)


def test_blocks_that_are_one_module_are_left() -> None:
    layers, left, _, _ = found(single_model("albert"))
    assert not any(layers.values())
    assert {one.why for one in left} == {
        "several blocks are one module: what suits one of them would change the others"
    }
    assert len(left) == 2


def test_experts_are_left_with_the_reason() -> None:
    layers, left, _, _ = found(single_model("mixtral"))
    assert all([one.site.kind for one in own] == ["head"] for own in layers.values())
    assert [one.why for one in left] == [EXPERTS]


def test_weights_of_two_places_are_left() -> None:
    model = single_model("llama")
    model.model.layers[2].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight
    layers, left, _, _ = found(model)
    assert [len(own) for own in layers.values()] == [2, 1, 1]
    assert [(one.what, one.why) for one in left] == [
        ("the FFN's last layer from block 1 on", "its weights are tied to another place of the model")
    ]


class Doubled(nn.Linear):
    """A layer that applies another matrix than its weight, as quantised ones do."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_layer_that_applies_another_matrix_is_left() -> None:
    model = tiny.tiny_model("llama")
    own = model.model.layers[0].mlp.down_proj
    other = Doubled(own.in_features, own.out_features, bias=False)
    other.weight.data = own.weight.data
    model.model.layers[0].mlp.down_proj = other
    layers, left, _, _ = found(model.requires_grad_(False))
    assert [len(each) for each in layers.values()] == [1, 2, 2]
    assert [one.what for one in left] == ["the FFN's last layer from block 0 on"]
    assert "not the matrix that it applies" in left[0].why

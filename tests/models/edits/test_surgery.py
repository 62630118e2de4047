"""Weights zeroed and cut in place, and everything as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import ModelStructure, discover, probe_trace
from duat_cli.models.edits.cutting import without_parts
from duat_cli.models.edits.neurons import neuron_layers
from duat_cli.models.edits.surgery import config_without_blocks, exchanged, without_blocks, zeroed
from duat_cli.models.terms.feedforward import find_feedforward
from duat_cli.models.terms.sites import TermId, find_sites


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def found(model_type: str) -> tuple[Any, ModelStructure, Any]:
    model = single_model(model_type)
    structure = discover(model)
    return model, structure, find_sites(structure)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_overlapping_terms_are_put_back(model_type: str) -> None:
    """A head inside an attention inside a block: each is zeroed, all come back."""
    model, structure, sites = found(model_type)
    before = state(model)
    terms = [TermId("head", 1, 2), TermId("attention", 1, 0), TermId("block", 1), TermId("head", 0, 1)]
    with zeroed(model, structure, sites, terms):
        inside = state(model)
        projection = structure.block(1).parts.output_projection
        assert projection is not None
        assert not bool(projection.linear.weight.any())  # type: ignore[union-attr, operator]
    assert not same(before, inside)
    assert same(before, state(model))


def test_an_error_inside_puts_everything_back() -> None:
    model, structure, sites = found("llama")
    before = state(model)
    with pytest.raises(KeyError), zeroed(model, structure, sites, [TermId("neuron", 0, 3)]):
        raise KeyError
    with pytest.raises(KeyError), without_blocks(model, structure, [1]):
        raise KeyError
    assert same(before, state(model))


def test_a_tied_weight_is_not_zeroed() -> None:
    model, structure, sites = found("llama")
    model.model.layers[2].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="tied"), zeroed(model, structure, sites, [TermId("neuron", 0, 3)]):
        pass
    assert same(before, state(model))


@pytest.mark.parametrize("term", [TermId("expert", 1, 0), TermId("expert", 1, 5), TermId("ffn", 1, 0)])
def test_experts_without_weights_are_not_zeroed(term: TermId) -> None:
    """longcat_flash: experts 4 and 5 are the identity, and rows of theirs in gate_up_proj are never read."""
    model, structure, sites = found("longcat_flash")
    site, _ = sites[structure.calls[1]].find(TermId("expert", 1, 0))
    assert {name: p.shape[0] for name, p in site.module.named_parameters()} == {"gate_up_proj": 6, "down_proj": 4}
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="6 experts"), zeroed(model, structure, sites, [term]):
        pass
    assert same(before, state(model))


def test_blocks_are_cut_out() -> None:
    model, structure, _ = found("gemma2")
    before, config = state(model), model.config
    with without_blocks(model, structure, [0]):
        assert list(model.model.layers) == list(structure.calls[1:])
        assert (model.config.num_hidden_layers, model.config.layer_types) == (2, config.layer_types[1:])
        assert not any(name.startswith("model.layers.2") for name in model.state_dict())
    assert model.config is config
    assert same(before, state(model))
    with pytest.raises(UnsupportedModelError, match="no block"), without_blocks(model, structure, [0, 1, 2]):
        pass


def test_blocks_are_cut_out_where_the_config_counts_them_under_another_name() -> None:
    """A block of longcat_flash has two attentions, and num_hidden_layers counts these."""
    model, structure, _ = found("longcat_flash")
    assert (model.config.num_layers, model.config.num_hidden_layers) == (3, 6)
    with without_blocks(model, structure, [0]):
        assert (model.config.num_layers, model.config.num_hidden_layers) == (2, 4)
        assert type(model)(model.config).state_dict().keys() == model.state_dict().keys()
    assert model.config.num_layers == 3


def test_shared_blocks_are_not_cut_out() -> None:
    model, structure, _ = found("albert")
    with pytest.raises(UnsupportedModelError, match="no plain list"), without_blocks(model, structure, [1]):
        pass


def test_lists_of_other_things_stay() -> None:
    config = single_model("llama").config
    config.architectures = ["a", "b", "c"]
    config.layer_types = ["x", "y", "z"]
    cut = config_without_blocks(config, 3, [0, 2])
    assert (cut.num_hidden_layers, cut.layer_types, cut.architectures) == (2, ["x", "z"], ["a", "b", "c"])
    assert (config.num_hidden_layers, config.layer_types) == (3, ["x", "y", "z"])
    with pytest.raises(UnsupportedModelError, match="number of its blocks"):
        config_without_blocks(config, 4, [0])


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "intermediate_size"), ("gpt2", "n_inner"), ("opt", "ffn_dim")]
)
def test_neurons_are_cut_out(model_type: str, name: str) -> None:
    model, structure, _ = found(model_type)
    before = state(model)
    written = probe_trace(structure.stack)
    forms = [find_feedforward(b.parts.units[0], written, b.parts.module) for b in structure.blocks]
    whole, layers = forms[0].neurons, [neuron_layers(form) for form in forms]
    with without_parts(model, [(one, [0, 5 + k]) for k, one in enumerate(layers)]):
        assert getattr(model.config, name) == whole - 2
        assert sum(v.numel() for v in model.state_dict().values()) < sum(v.numel() for v in before.values())
    assert same(before, state(model))
    uneven = [(one, list(range(k + 1))) for k, one in enumerate(layers)]
    with pytest.raises(UnsupportedModelError, match="different widths"), without_parts(model, uneven):
        pass


def test_other_values_are_there_for_a_while_and_nothing_is_copied() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    before, address, own = layer(x), layer.weight.data_ptr(), layer.weight
    new = torch.full((2, 3), 2.0)
    with exchanged({layer.weight: new}):
        assert layer.weight is own
        assert layer.weight.data_ptr() == new.data_ptr()
        assert torch.equal(layer(x), torch.full((1, 2), 6.0) + layer.bias)
        with exchanged({layer.weight: torch.zeros(2, 3)}):
            assert torch.equal(layer(x)[0], layer.bias)
        assert torch.equal(layer.weight, new)
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer(x), before)


def test_an_error_leaves_no_trace_of_other_values() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.clone()
    with pytest.raises(KeyboardInterrupt), exchanged({layer.weight: torch.zeros(2, 3)}):
        raise KeyboardInterrupt
    assert torch.equal(layer.weight, before)

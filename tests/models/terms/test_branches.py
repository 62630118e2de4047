"""How branches reach the stream, on models whose wiring is known."""

from __future__ import annotations

import pytest
import torch
from helpers import single_model
from pruning import branches_of

from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms import branches
from duat_cli.models.terms.branches import Branch
from duat_cli.models.terms.sites import find_sites

# model type -> factor, attention's norm, the FFN's norm, whether the stream passes through the block
WIRING = {
    "llama": (1.0, None, None, True),
    "granite": (0.6, None, None, True),
    "gpt_neox": (1.0, None, None, True),
    "gemma2": (1.0, "post_attention_layernorm", "post_feedforward_layernorm", True),
    "olmo2": (1.0, "post_attention_layernorm", "post_feedforward_layernorm", True),
    "bert": (1.0, None, None, False),
}


@pytest.mark.parametrize("model_type", list(WIRING))
def test_the_wiring_is_found(model_type: str) -> None:
    factor, first, second, through = WIRING[model_type]
    structure = discover(single_model(model_type))
    sites = find_sites(structure)
    for module, block in branches_of(structure, sites).items():
        names = {norm: name for name, norm in module.named_modules()}
        for kind, norm in (("attention", first), ("ffn", second)):
            [site] = sites[module].of(kind)
            branch = block.at(site)
            assert isinstance(branch, Branch), branch
            assert branch.factor == pytest.approx(factor, rel=1e-5)
            assert float(branch.factor) >= factor
            assert (None if branch.norm is None else names[branch.norm]) == norm
        assert block.through == through


def test_what_a_block_adds_beside_its_branches_is_seen() -> None:
    model = single_model("llama")
    layer = model.model.layers[1]
    before = layer.forward
    layer.forward = lambda x, *args, **kwargs: before(x, *args, **kwargs) + 0.01
    structure = discover(model)
    found = branches_of(structure, find_sites(structure))
    assert [found[module].adds for module in structure.calls] == [module is layer for module in structure.calls]
    assert all(block.through for block in found.values())


def test_a_factor_is_one_number_for_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(5, 8, generator=generator)
    assert branches._factor(sent, 0.3 * sent, torch.float32) == pytest.approx(0.3, rel=1e-5)
    for arrived in (sent * torch.rand(5, 1, generator=generator), sent.roll(1, 0), sent[:, :4]):
        assert isinstance(branches._factor(sent, arrived, torch.float32), str)

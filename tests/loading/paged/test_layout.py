"""Which tensors go in and out of memory together."""

from __future__ import annotations

import torch
from torch import nn

from duat_cli.loading.paged.layout import Page, block_names, layout, tied


class Model(nn.Module):
    """Two blocks, an embedding whose weight is the head's, a norm, and a layer that both blocks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"own": nn.Linear(8, 8), "shared": shared}) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embed.weight


TARGETS = {
    "e": ("embed.weight", False),
    **{f"l{k}": (f"layers.{k}.own.weight", False) for k in range(2)},
    "s": ("layers.0.shared.weight", False),
    "n": ("norm.weight", False),
    "b": ("head.bias", False),
}


def pages(kept: int) -> dict[str, Page]:
    return {page.name: page for page in layout(Model(), TARGETS, kept=kept)}


def test_blocks_are_pages_and_the_rest_is_the_frame() -> None:
    found = pages(kept=1 << 20)
    assert list(found) == ["", "layers.0", "layers.1"]
    assert found["layers.0"].tensors == ("l0",)
    assert set(found[""].tensors) == {"e", "s", "n", "b"}  # what both blocks share stays
    assert found["layers.1"].block
    assert not found["layers.1"].by_rows


def test_large_layers_that_share_weights_are_one_page_with_a_door_each() -> None:
    found = pages(kept=0)
    assert list(found) == ["", "embed", "layers.0", "layers.1"]
    assert set(found["embed"].tensors) == {"e", "b"}
    assert [type(door) for door in found["embed"].doors] == [nn.Embedding, nn.Linear]
    assert not found["embed"].by_rows  # the bias is no row of it
    targets = {name: target for name, target in TARGETS.items() if name != "b"}
    assert {page.name: page for page in layout(Model(), targets, kept=0)}["embed"].by_rows


def test_an_embedding_whose_values_change_on_the_way_is_read_whole() -> None:
    targets = {"e": ("embed.weight", True), "l0": TARGETS["l0"]}
    assert not {page.name: page for page in layout(Model(), targets, kept=0)}["embed"].by_rows


def test_lists_inside_lists_are_not_blocks_their_elements_are() -> None:
    inner = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)]
    model = nn.Sequential(nn.ModuleList(inner))
    assert block_names(model) == ["0.0.0", "0.0.1", "0.1"]


def test_elements_of_a_sequential_of_blocks_are_blocks() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"linear": nn.Linear(2, 2)})

    model = nn.ModuleDict(
        {"blocks": nn.Sequential(block(), block()), "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU())}
    )
    assert block_names(model) == ["blocks.0", "blocks.1"]


def test_an_embedding_under_two_names_is_one_page() -> None:
    model = Model()
    model.encoder = nn.Module()
    model.encoder.tokens = model.embed
    found = {page.name: page for page in layout(model, {"e": TARGETS["e"]}, kept=0)}
    assert found["embed"].tensors == ("e",)
    assert found[""].tensors == ()


def test_tied_names() -> None:
    model = Model()
    groups = {frozenset(group) for group in tied(model)}
    assert frozenset({"embed.weight", "head.weight"}) in groups
    model.register_buffer("again", model.norm.weight.detach())
    model.norm.register_buffer("same", model.again)
    assert ["again", "norm.same"] in tied(model)
    assert all(torch.is_tensor(model.get_parameter(g[0])) for g in tied(model) if g[0] != "again")

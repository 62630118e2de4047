"""Modules that ask for their weights."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from duat_cli.loading.paged.doors import guard
from duat_cli.loading.paged.layout import Page


class Weights:
    def __init__(self, table: Tensor) -> None:
        self.table, self.held = table, None
        self.asked: list[Page] = []
        self.at_door = self.asked.append
        self.rows_read: list[int] = []

    def rows(self, page: Page, rows: Tensor) -> Tensor:
        self.rows_read += rows.tolist()
        return self.table[rows]


def test_a_layer_asks_once_a_call_as_long_as_its_page_is_missing() -> None:
    layer, weights = nn.Linear(2, 2), Weights(torch.zeros(0))
    page = Page("layer", (layer,), ("t",), block=True, by_rows=False)
    guard(weights, page, layer)
    layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))
    assert weights.asked == [page, page]
    weights.held = page
    layer(torch.zeros(1, 2))
    assert len(weights.asked) == 2


def test_an_embedding_reads_the_rows_it_needs_once_each() -> None:
    table = torch.randn(40, 6)
    layer = nn.Embedding(40, 6, padding_idx=39)
    placeholder = layer.weight
    weights = Weights(table)
    page = Page("embed", (layer,), ("t",), block=False, by_rows=True)
    guard(weights, page, layer)
    ids = torch.tensor([[7, 39, 7, 0]])
    assert torch.equal(layer(ids), table[ids])
    assert sorted(weights.rows_read) == [0, 7, 39]
    assert layer.weight is placeholder
    assert layer.padding_idx == 39
    assert weights.asked == []
    weights.held = page
    assert torch.equal(layer(ids), placeholder[ids])


def test_the_placeholder_is_back_after_an_error() -> None:
    layer = nn.Embedding(4, 2)
    placeholder = layer.weight
    weights = Weights(torch.zeros(4, 3))
    guard(weights, Page("embed", (layer,), ("t",), block=False, by_rows=True), layer)

    def fail(module: nn.Module, args: object, output: object) -> None:
        raise ValueError("planted")

    layer.register_forward_hook(fail)
    with contextlib.suppress(ValueError):
        layer(torch.tensor([[1]]))
    assert layer.weight is placeholder

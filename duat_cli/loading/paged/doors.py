"""The doors of a page: modules that ask for their weights when they are about to run without them.

They are part of the model, not instruments: they stay, and change nothing of what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from duat_cli.loading.paged.layout import Page


class Weights(Protocol):
    """Who reads pages."""

    held: Page | None
    at_door: Callable[[Page], None]

    def rows(self, page: Page, rows: Tensor) -> Tensor: ...


def guard(weights: Weights, page: Page, door: nn.Module) -> None:
    """Ask for the page whenever the module is about to run without it; an embedding asks for rows alone."""
    if page.by_rows and isinstance(door, nn.Embedding):
        _guard_rows(weights, page, door)
        return

    def ask(module: nn.Module, args: Any) -> None:
        if weights.held is not page:
            weights.at_door(page)

    door.register_forward_pre_hook(ask)


def _guard_rows(weights: Weights, page: Page, door: nn.Embedding) -> None:
    """Give the embedding the rows that it is asked for, numbered anew, for the time of its call."""
    before: list[tuple[Any, Any]] = []

    def narrow(module: nn.Module, args: Any) -> Any:
        if weights.held is page:
            return None
        rows, numbers = torch.unique(args[0], return_inverse=True)
        before.append((door.weight, door.padding_idx))
        door.weight = nn.Parameter(weights.rows(page, rows), requires_grad=False)
        door.padding_idx = None  # a number among all rows; it matters to gradients alone
        return (numbers, *args[1:])

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        if before:
            door.weight, door.padding_idx = before.pop()

    door.register_forward_pre_hook(narrow)
    door.register_forward_hook(restore, always_call=True)

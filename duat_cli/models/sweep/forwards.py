"""Plain passes of a model, side by side where its weights are read block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from duat_cli.models.sweep.lockstep import Call, Weights, together


class Watched:
    """A pass among others whose hooks look at it alone: they ask `on`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.on = call, False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What `run` needs around it."""
        self.on = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.on = False

    def run(self) -> None:
        self._call()


def forwards(weights: Weights | None, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What these calls of a model give. weights: where they are read block by block, for all calls at once."""
    passes = [Call(call) for call in calls]
    together(passes, weights)
    return [each.output for each in passes]

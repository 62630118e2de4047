"""Passes beside the prompt's own, and what is kept of what they put out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from duat_cli.analysis.attribute.targets import Target
from duat_cli.models.instrument.hooks import After, hooked


class Seen:
    """A pass with its output, and with the logits before they are capped, if the model caps them."""

    def __init__(
        self, one: Any, layer: nn.Module | None, edit: tuple[nn.Module, After] | None = None, *, of: Target | None
    ) -> None:
        """one: a pass that keeps its `output`. layer: the head's last layer, if its output is capped. edit: a module,
        and a function that changes its output. of: the target whose `value` and `row` are kept in the output's place,
        which is as large as the vocabulary for every token; None: the output is kept."""
        self._pass, self._layer, self._edit, self._target = one, layer, edit, of
        self._kept: list[Tensor] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context in which `run` is called."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._pass.active())
            stack.enter_context(hooked([] if self._layer is None else [self._layer], after=self._see))
            if self._edit is not None:
                stack.enter_context(hooked([self._edit[0]], after=self._edit[1]))
            yield

    def run(self) -> None:
        self._pass.run()
        if self._target is not None:
            self.value, self.row = float(self._target.after(self.raw)), self._target.row(self.output).clone()
            self._pass.output = None
            self._kept.clear()

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self._kept[:] = [output]

    @property
    def output(self) -> Tensor:
        """The model's output."""
        found: Tensor = self._pass.output.detach()
        return found

    @property
    def raw(self) -> Tensor:
        """The model's output before it is capped."""
        return self._kept[0] if self._kept else self.output

"""Findings on a model before a prompt runs: where its branches meet the stream, the linear layers of its FFNs, and
whether it predicts the next token, or a class, and whether the words of a text with pictures have a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from duat_cli.analysis.ahead import Ahead
from duat_cli.analysis.session import Session
from duat_cli.compat.libc import give_back_free_memory
from duat_cli.errors import or_reason
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.causality import Classes, HeadTest
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_inputs
from duat_cli.models.discovery.structure import Discovered
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.sweep.lockstep import Placing
from duat_cli.models.terms.branches import Branches
from duat_cli.models.terms.feedforward import FeedForward, find_feedforward

Side = Literal["second", "third"]


@dataclass(frozen=True)
class Ground:
    """A model that is ready to run prompts."""

    session: Session
    branches: Branches
    layers: Mapping[nn.Module, Mapping[str, Side]]
    """Block module -> its FFN's linear layers, by their names in the model, and the side of the nonlinearity that each
    is on, as Eq. 11's index of W'."""
    reasons: Mapping[str, str]
    """Name of an FFN, or of its block -> why its layers are not known."""
    why_no_next_token: str | None
    classes: Classes | None
    why_no_loss: str | None
    """Why the words of a text with pictures have no loss; None where they have one."""


def ground_of(session: Session, *, layers: bool) -> Ground:
    """Runs the tests that prompts need on a model. layers: whether to look for the FFNs' linear layers."""
    loaded = session.loaded

    def guest_of(found: Discovered) -> _Guest:
        model, device, like = loaded.headed, loaded.device, loaded.like
        ahead = Ahead(model, probe_inputs(found.stack, like, DISCOVERY_TOKENS, device))
        return _Guest(loaded.named, HeadTest(model, found.stack, device, like), ahead, layers=layers)

    guest = session.discover_beside(guest_of)
    if loaded.like is not None:  # the traces of all blocks are as large as a picture
        give_back_free_memory()
    head = guest.head
    why_no_next, why_no_loss = head.why_no_next_token(), guest.ahead.why_no_loss
    return Ground(session, guest.branches, guest.layers, guest.reasons, why_no_next, head.classes, why_no_loss)


class _Guest(Placing):
    """Passes that go through the model beside one attempt at its discovery, and what they find."""

    def __init__(self, model: nn.Module, head: HeadTest, ahead: Ahead, *, layers: bool) -> None:
        super().__init__([*head.passes, *ahead.passes])
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = layers
        self.layers: dict[nn.Module, Mapping[str, Side]] = {}
        self.reasons: dict[str, str] = {}
        self.head, self.ahead = head, ahead

    def proved(self, parts: BlockParts, written: Trace) -> None:
        super().proved(parts, written)
        if self._layers:
            self.layers[parts.module] = self._linears(parts, written)

    def _linears(self, parts: BlockParts, written: Trace) -> dict[str, Side]:
        sides: dict[str, Side] = {}
        for unit in parts.units:
            form = _form(unit, written, parts)
            if isinstance(form, str):
                self.reasons[self._names[unit]] = form
                self.reasons.setdefault(self._names[parts.module], form)  # its layers may stand outside of it
                continue
            sides |= {self._names[linear]: "second" for linear in form.linears}
            sides[self._names[form.down]] = "third"
        return sides


def _form(unit: nn.Module, written: Trace, parts: BlockParts) -> FeedForward | str:
    if unit in parts.mixing:
        return f"{type(unit).__name__} mixes tokens: Eq. 18 is about FFNs"
    return or_reason(lambda: find_feedforward(unit, written, parts.module))

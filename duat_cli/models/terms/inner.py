"""What one block call consists of: its heads and its FFNs, each with a reason in place of what is not proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from duat_cli.errors import or_reason
from duat_cli.models.block.linears import matrix_of
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.terms.experts import Experts, find_experts
from duat_cli.models.terms.feedforward import FeedForward, find_feedforward
from duat_cli.models.terms.sites import Site, Sites
from duat_cli.models.value_path.projections import layer_factors
from duat_cli.operators.kronecker import HeadFactors


@dataclass(frozen=True)
class Inner:
    """What a block call consists of; a reason in place of what could not be proved."""

    event: Event
    parts: BlockParts
    attention: AttentionCall | None
    heads: tuple[Tensor, HeadFactors] | str  # what the values are made of (1, N, width), V and O
    output: Tensor | None  # the layer that takes the concatenated heads, (heads d, M), if there is one
    units: tuple[tuple[nn.Module, FeedForward | Experts | str], ...]  # in call order

    def last_layers(self) -> list[nn.Module]:
        """What the branches end in: the layer that takes the heads, and for a unit the layer behind it or itself."""
        attention = self.parts.output_projection
        outside = [f.down if isinstance(f, FeedForward) and self._outside(m, f) else m for m, f in self.units]
        return [*([] if attention is None else [attention.linear]), *outside]

    def columns_outside(self, place: int) -> Tensor | None:
        """The layer behind a unit, where it stands outside of it."""
        module, form = self.units[place]
        return form.columns() if isinstance(form, FeedForward) and self._outside(module, form) else None

    def _outside(self, unit: nn.Module, form: FeedForward) -> bool:
        return form.down not in set(unit.modules())


def inner_of(structure: ModelStructure, sites: Sites, written: Trace, number: int) -> Inner:
    """Everything of the block call of that number, from a trace of this call."""
    parts = structure.block(number).parts
    attention = written.attention_of(parts.attention)
    each = len(attention)
    heads: tuple[Tensor, HeadFactors] | str = f"it calls attention {each} times; heads are defined for one call"
    output = None
    if parts.mixer is not None:
        heads = "its token mixer is held as a whole, so no head is shown to be an average of values"
    elif each == 1:
        heads = or_reason(lambda: layer_factors(parts, written, attention[0]))
        output = _output_layer(parts, attention[0]) if isinstance(heads, str) else heads[1].output.flatten(0, 1)
    routed = sites[parts.module].of("expert")
    units = []
    for event in (e for e in written.events if e.module in parts.units):
        occurrence = next(k for k, e in enumerate(written.calls(event.module)) if e is event)
        units.append((event.module, form_of(parts, routed, written, event.module, occurrence)))
    one = attention[0] if each == 1 else None
    return Inner(written.calls(parts.module)[0], parts, one, heads, output, tuple(units))


def _output_layer(parts: BlockParts, call: AttentionCall) -> Tensor | None:
    """The layer that takes the concatenated heads, (heads d, M); None without one."""
    last = parts.output_projection
    found = None if last is None else or_reason(lambda: matrix_of(last.linear, call.output.shape[2:].numel()))
    return None if isinstance(found, str) else found


def form_of(
    parts: BlockParts, routed: Sequence[Site], written: Trace, unit: nn.Module, occurrence: int
) -> FeedForward | Experts | str:
    """The form of one unit, in its call of that number, or why none is proved. routed: the block's sites of experts."""
    if unit in parts.mixing:
        return f"{type(unit).__name__} mixes tokens without softmax attention"
    site = next((s for s in routed if s.module in set(unit.modules())), None)
    if site is not None:
        return or_reason(lambda: find_experts(unit, site, written, occurrence))
    return or_reason(lambda: find_feedforward(unit, written, parts.module, occurrence))

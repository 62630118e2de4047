"""The pieces of one block call, its heads and its FFNs, each replaced by a reason where it is not proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from duat_cli.errors import or_reason
from duat_cli.models.arrays import equal
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.terms.branches import CHANGED
from duat_cli.models.terms.experts import Experts, find_experts
from duat_cli.models.terms.feedforward import FeedForward, find_feedforward
from duat_cli.models.terms.sites import Site, Sites
from duat_cli.models.value_path.projections import layer_factors
from duat_cli.operators.kronecker import HeadFactors


@dataclass(frozen=True)
class Inner:
    """The pieces of a block call; a reason stands in place of one that could not be proved."""

    event: Event
    parts: BlockParts
    attention: AttentionCall | None
    heads: tuple[Tensor, HeadFactors] | str  # the input of the layer that makes the values, (1, N, width); V and O
    last: nn.Module | str  # the layer that takes the concatenated heads
    units: tuple[tuple[nn.Module, FeedForward | Experts | str], ...]  # in call order

    def end(self, place: int) -> nn.Module:
        """The module in which a unit's branch ends: the layer behind the unit, or the unit if that layer is inside."""
        unit, form = self.units[place]
        return form.down if isinstance(form, FeedForward) and form.down not in set(unit.modules()) else unit


def inner_of(structure: ModelStructure, sites: Sites, written: Trace, number: int) -> Inner:
    """All pieces of block call `number`, from the trace of this call."""
    parts = structure.block(number).parts
    attention = written.attention_of(parts.attention)
    each = len(attention)
    heads: tuple[Tensor, HeadFactors] | str = f"it calls attention {each} times; heads are defined for one call"
    last: nn.Module | str = "no linear layer takes its concatenated heads"
    if parts.mixer is not None:
        heads = "its token mixer is held as a whole, so no head is shown to be an average of values"
    elif each == 1:
        heads = or_reason(lambda: layer_factors(parts, written, attention[0]))
        last = _taking(parts, written, attention[0])
    routed = sites[parts.module].of("expert")
    units = []
    for event in (e for e in written.events if e.module in parts.units):
        occurrence = next(k for k, e in enumerate(written.calls(event.module)) if e is event)
        units.append((event.module, form_of(parts, routed, written, event.module, occurrence)))
    one = attention[0] if each == 1 else None
    return Inner(written.calls(parts.module)[0], parts, one, heads, last, tuple(units))


def _taking(parts: BlockParts, written: Trace, call: AttentionCall) -> nn.Module | str:
    """The layer that reads the concatenated heads unchanged, or the reason why there is none."""
    if parts.output_projection is None:
        return "no linear layer takes its concatenated heads"
    linear = parts.output_projection.linear
    return linear if equal(written.calls(linear)[-1].tensors[0], call.output.flatten(2)) else CHANGED


def form_of(
    parts: BlockParts, routed: Sequence[Site], written: Trace, unit: nn.Module, occurrence: int
) -> FeedForward | Experts | str:
    """The form of one unit in its call number `occurrence`, or the reason why none is proved. routed: the block's sites
    of experts."""
    if unit in parts.mixing:
        return f"{type(unit).__name__} mixes tokens without softmax attention"
    site = next((s for s in routed if s.module in set(unit.modules())), None)
    if site is not None:
        return or_reason(lambda: find_experts(unit, site, written, occurrence))
    return or_reason(lambda: find_feedforward(unit, written, parts.module, occurrence))

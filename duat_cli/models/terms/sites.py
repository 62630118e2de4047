"""Sites: the tensors in which a block's terms (neurons, heads, experts, FFN and attention) can be seen and removed.

A term is an additive contribution to the residual stream. Those of Eq. 13-16 are neurons; heads, experts, attention
and blocks are treated in the same way here. Each kind has one tensor in the model's own forward pass: neurons the input
of the FFN's last linear layer, heads the input of attention's output projection, experts the routing weights. A site
names that tensor and says which of its elements belong to which term. To remove a term, or to find how the output
depends on it, only this tensor is used.

Sites are found by following memory and proved on a short random input; a kind that is not proved has a reason instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.kinds import Kind
from duat_cli.models.arrays import random_like, relative_error, rounding, same_storage
from duat_cli.models.block.linears import has_matrix
from duat_cli.models.block.parts import BlockParts, CrossAttention
from duat_cli.models.block.slots import joined, parted, put, slots_of, taken
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_inputs
from duat_cli.models.discovery.structure import ModelStructure, probe_trace
from duat_cli.models.instrument.calls import without_cache
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.routers import Routing, experts_of, routing_slots
from duat_cli.models.instrument.tracing import Event, Trace

Place = Literal["input", "output", "routing"]


@dataclass(frozen=True, order=True, slots=True)
class TermId:
    """One term: a block's call number, and the term's index among its kind there (None for a whole block)."""

    kind: Kind
    block: int
    index: int | None = None


def by_block(terms: Iterable[TermId]) -> dict[int, list[TermId]]:
    """The terms of every block call that has some."""
    return by_key((term.block, term) for term in terms)


@dataclass(frozen=True)
class Site:
    """One tensor of a block, and the terms in it."""

    kind: Kind
    module: nn.Module
    place: Place
    count: int  # number of terms
    offset: int = 0  # index of the first of them among the block's terms of this kind
    routing: Routing | None = None
    unit: nn.Module | None = None  # of neurons: the nonlinear module that makes them, or holds the layer
    behind: nn.Module | None = None  # a norm without bias that reads only this output: both are zero together

    @property
    def watched(self) -> nn.Module:
        """The module at which the term is seen: the norm behind it, if any (no slope along its input's length)."""
        return self.module if self.behind is None else self.behind

    def spread(self, mask: Tensor, value: Tensor, index: Tensor | None) -> Tensor:
        """A factor for every element of the tensor, from one number per term. mask: (count,)."""
        if self.kind == "expert":
            return mask[needed(index)]
        if self.count == 1:
            return mask
        return mask.repeat_interleave(value.shape[-1] // self.count)

    def collect(self, product: Tensor, index: Tensor | None) -> Tensor:
        """The sums of elementwise products over each term's elements: (items, *tensor shape) to (items, count)."""
        items = product.shape[0]
        if self.kind == "expert":
            sums = product.new_zeros(items, self.count)
            return sums.index_add_(1, needed(index).flatten(), product.reshape(items, -1))
        if self.count == 1:
            return product.reshape(items, -1).sum(dim=1, keepdim=True)
        rows = product.reshape(items, -1, self.count, product.shape[-1] // self.count)
        return rows.sum(dim=(1, 3))


@dataclass(frozen=True)
class BlockSites:
    """The sites of one block module, and for each kind without any the reason."""

    sites: tuple[Site, ...]
    reasons: dict[Kind, str] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Site]:
        return [site for site in self.sites if site.kind == kind]

    def count(self, kind: Kind) -> int:
        """How many terms of this kind the block has."""
        return 1 if kind == "block" else sum(site.count for site in self.of(kind))

    def find(self, term: TermId) -> tuple[Site, int]:
        """The site of a term, and the term's number in it."""
        assert term.index is not None
        for site in self.of(term.kind):
            if site.offset <= term.index < site.offset + site.count:
                return site, term.index - site.offset
        raise IndexError(f"{term} has no site")


Sites = Mapping[nn.Module, BlockSites]  # by block module
Edit = Callable[[Site, Tensor, Tensor | None], Tensor | None]


@contextlib.contextmanager
def watching(sites: Sequence[Site], edit: Edit) -> Iterator[None]:
    """While active, `edit(site, tensor, expert index)` is called with each site's tensor and may replace it."""
    with contextlib.ExitStack() as stack:
        for site in sites:
            stack.enter_context(_at_output(site, edit) if site.place == "output" else _at_input(site, edit))
        yield


def _at_output(site: Site, edit: Edit) -> contextlib.AbstractContextManager[None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        tensor, rest = parted(output)
        edited = edit(site, tensor, None)
        return None if edited is None else joined(edited, rest)

    return hooked([site.watched], after=hook)


def _at_input(site: Site, edit: Edit) -> contextlib.AbstractContextManager[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if site.routing is not None:
            key, index = site.routing.weights, taken(args, kwargs, site.routing.index)
        else:
            key, index = slots_of(args, kwargs)[0][0], None
        edited = edit(site, taken(args, kwargs, key), index)
        return None if edited is None else put(args, kwargs, {key: edited})

    return hooked([site.watched], hook)


# -- finding -------------------------------------------------------------------------------------------------


def find_sites(structure: ModelStructure, like: Mapping[str, Tensor] | None = None) -> dict[nn.Module, BlockSites]:
    """The sites of every distinct block module, found on one short run. like: as in `probe_inputs`."""
    written = probe_trace(structure.stack, probe_inputs(structure.stack, like, DISCOVERY_TOKENS), structure.part)
    return {block.parts.module: block_sites(block.parts, written) for block in structure.blocks}


def block_sites(parts: BlockParts, written: Trace) -> BlockSites:
    """The sites of one block, from its trace; its weights are in memory."""
    found = _sites(parts, written)
    event = written.calls(parts.module)[0]
    sites = tuple(_put_behind_norm(parts, event, s) if s.kind in ("attention", "ffn") else s for s in found.sites)
    return replace(found, sites=sites)


def _put_behind_norm(parts: BlockParts, event: Event, site: Site) -> Site:
    """The site of a branch with the norm behind it, if there is one: a norm whose input is zero without the branch."""
    silent: dict[nn.Module, bool] = {}  # in call order: whether the norm's input is zero

    def read(norm: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tensor = slots_of(args, kwargs)[0][1]
        silent[norm] = silent.get(norm, True) and not bool(tensor.any())

    unbiased = [norm for norm, form in parts.norms.items() if form.bias is None]
    args, kwargs = without_cache(event.args, event.kwargs)
    with torch.no_grad(), hooked(unbiased, read), watching([site], _silence):
        event.module(*args, **kwargs)
    return replace(site, behind=next((norm for norm, zero in silent.items() if zero), None))


def _silence(site: Site, tensor: Tensor, index: Tensor | None) -> Tensor:
    return torch.zeros_like(tensor)


def _sites(parts: BlockParts, written: Trace) -> BlockSites:
    found: list[Site] = []
    reasons: dict[Kind, str] = {}
    _attention_sites(parts, written, found, reasons)
    if not parts.feedforward:
        reasons |= dict.fromkeys(("ffn", "neuron", "expert"), "no nonlinear FFN was found in the block")
    for unit in parts.feedforward:
        _unit_sites(parts, unit, written, found, reasons)
    return BlockSites(
        tuple(found), {kind: why for kind, why in reasons.items() if not any(s.kind == kind for s in found)}
    )


def _attention_sites(parts: BlockParts, written: Trace, found: list[Site], reasons: dict[Kind, str]) -> None:
    _own_sites(parts, written, found, reasons)
    if parts.cross is not None:
        _cross_sites(parts.cross, written, found, reasons)


def _cross_sites(cross: CrossAttention, written: Trace, found: list[Site], reasons: dict[Kind, str]) -> None:
    """The sites of cross-attention, whose terms are numbered behind those of the block's own attention."""
    heads, before = (sum(site.count for site in found if site.kind == kind) for kind in ("head", "attention"))
    if cross.output_projection is None:
        reasons["head"] = "no linear layer takes the concatenated heads of its cross-attention"
        found.append(Site("attention", cross.module, "output", 1, before))
        return
    projection = cross.output_projection.linear
    end = cross.module if projection in set(cross.module.modules()) else projection  # a replay runs no layer inside
    call = next(c for c in written.attention if c.module is cross.module)
    found.append(Site("attention", end, "output", 1, before))
    found.append(Site("head", projection, "input", call.output.shape[2], heads))


def _own_sites(parts: BlockParts, written: Trace, found: list[Site], reasons: dict[Kind, str]) -> None:
    if not parts.attention:
        reasons |= dict.fromkeys(("attention", "head"), "the block has no softmax attention")
        return
    if parts.output_projection is None:
        alone = "no linear layer takes its concatenated heads"
        several = f"it has {len(parts.attention)} attentions, whose heads are not told apart; each is one term"
        reasons["head"] = alone if len(parts.attention) == 1 else several
        sites = [Site("attention", module, "output", 1, k) for k, module in enumerate(parts.attention)]
        if any(_holds_residual(parts, written, site) for site in sites):
            reasons["attention"] = "its module adds the stream to what attention gives, and returns their sum"
        else:
            found += sites
        return
    projection = parts.output_projection.linear
    found.append(Site("attention", projection, "output", 1))
    if parts.mixer is not None:
        if parts.mixer.width > 1:
            found.append(
                Site("head", projection, "input", math.prod(parts.mixer.result_layout.rest) // parts.mixer.width)
            )
        else:
            reasons["head"] = "its token mixer treats every channel by itself: it has no heads"
        return
    call = next((c for c in written.attention if c.module is parts.attention[0]), None)
    if call is None:
        reasons["head"] = "the module that runs its attention was not seen to"
    else:
        read = written.calls(projection)[-1].tensors[0]  # heads * d; the call may have windows and heads on one axis
        found.append(Site("head", projection, "input", read.shape[-1] // call.output.shape[3]))


def _holds_residual(parts: BlockParts, written: Trace, site: Site) -> bool:
    """Whether the stream reaches the block's output through the module of this site alone: without what the module
    gives, the output is the same for every input."""
    event, slot, outputs = written.calls(parts.module)[0], parts.hidden, list[Tensor]()
    call = without_cache(event.args, event.kwargs)
    own = slot.get(*call)
    with torch.no_grad(), watching([site], _silence):
        for x in (own, random_like(own)):
            args, kwargs = slot.put(*call, x)
            outputs.append(slot.found(parts.module(*args, **kwargs), x))
    return torch.equal(*outputs)


def _unit_sites(
    parts: BlockParts, unit: nn.Module, written: Trace, found: list[Site], reasons: dict[Kind, str]
) -> None:
    event = written.calls(unit)[0]
    ffn_offset = sum(site.count for site in found if site.kind == "ffn")
    down = _last_linear(event, written)
    last = event
    if down is None or not _is_constant_without(event, down):
        readers = _readers(parts, event, written)
        down = readers[0] if readers else None
        if len(readers) > 1 or (down is not None and not _may_be_down(parts, down)):
            why = f"what {type(unit).__name__} puts out does not go to the residual stream, but into other layers"
            reasons |= dict.fromkeys(("ffn", "neuron", "expert"), why)
            return
        last = down or event
    found.append(Site("ffn", last.module, "output", 1, ffn_offset))
    if down is None:
        reasons["neuron"] = f"the output of {type(unit).__name__} is not made by one linear layer of its neurons"
    else:
        offset = sum(site.count for site in found if site.kind == "neuron")
        found.append(Site("neuron", down.module, "input", down.tensors[0].shape[-1], offset, unit=unit))
    experts = _experts(unit, written)
    if isinstance(experts, Site):
        found.append(experts)
    else:
        reasons["expert"] = experts


def _last_linear(unit: Event, written: Trace) -> Event | None:
    """The linear layer inside the unit whose output is that of the unit."""
    inside = set(unit.module.modules()) - {unit.module}
    for event in reversed(written.events):
        if event.module in inside and not any(event.module.children()) and has_matrix(event.module):
            made = event.result
            if made is not None and unit.result is not None and event.tensors and same_storage(made, unit.result):
                return event
    return None


def _is_constant_without(unit: Event, down: Event) -> bool:
    """Whether the unit's output is its last layer's bias at every token, and nothing else, if the neurons are zero."""
    site = Site("neuron", down.module, "input", 1)
    with torch.no_grad(), watching([site], _silence):
        output = parted(unit.module(*unit.args, **unit.kwargs))[0]
        bias = down.module(torch.zeros_like(down.tensors[0]))
    return output.shape == bias.shape and torch.equal(output, bias)


def _readers(parts: BlockParts, unit: Event, written: Trace) -> list[Event]:
    """The innermost modules of the block that have matrices and read the unit's output."""
    inside, found = set(parts.module.modules()) - {parts.module}, list[Event]()
    for event in written.events[written.events.index(unit) + 1 :]:
        if event.module not in inside or unit.result is None:
            continue
        if not any(p.ndim >= 2 for p in event.module.parameters()):
            continue  # a norm or a dropout
        around = any(reader.module in set(event.module.modules()) for reader in found)
        if not around and any(same_storage(tensor, unit.result) for tensor in event.tensors):
            found.append(event)
    return found


def _may_be_down(parts: BlockParts, event: Event) -> bool:
    """Whether a reader is a single linear layer outside attention."""
    attention = {inner for module in parts.attention for inner in parts.modules_of(module)}
    return event.module not in attention and not any(event.module.children()) and has_matrix(event.module)


def _experts(unit: nn.Module, written: Trace) -> Site | str:
    """The site of a routed unit's experts, proved to be linear in their routing weights, or why there is none."""
    for module in unit.modules():
        for event in written.calls(module)[:1]:
            routing = routing_slots(event.args, event.kwargs)
            count = experts_of(module)
            if routing is None or not count:
                continue
            if _is_sum_of_experts(event, routing, count):
                return Site("expert", module, "routing", count, routing=routing)
            return f"{type(module).__name__} is not a sum of its experts weighted by its routing"
    return "the FFN routes to no experts that could be told apart"


def _is_sum_of_experts(event: Event, routing: Routing, count: int) -> bool:
    index = taken(event.args, event.kwargs, routing.index)
    weights = taken(event.args, event.kwargs, routing.weights)
    if int(index.max()) >= count:
        return False
    with torch.no_grad():
        parts = []
        for expert in range(count):
            only = torch.where(index == expert, weights, 0)
            args, kwargs = put(event.args, event.kwargs, {routing.weights: only})
            parts.append(parted(event.module(*args, **kwargs))[0])
    whole = needed(event.result)
    return relative_error(torch.stack(parts).sum(dim=0), whole) <= rounding(whole.dtype)

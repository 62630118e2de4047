"""The parts of one block, found by what they do in one traced call of it.

Norms are modules that behave as one (norms.py); an FFN unit is a nonlinear module of the block, outside attention, that
reads the hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import buffers_of, parameters_of, standing_in
from duat_cli.errors import NotFiniteError, UnsupportedModelError, needed
from duat_cli.models.arrays import equal, random_like, relative_error, rounding, same_storage, tolerance_for, wide
from duat_cli.models.block.norms import NormForm, recognise, scale_invariant
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import taken
from duat_cli.models.discovery.beside import beside, hidden_slot
from duat_cli.models.discovery.cross import find_cross, with_projections
from duat_cli.models.instrument.calls import handed
from duat_cli.models.instrument.functions.streams import streams_weighed
from duat_cli.models.instrument.routers import routing_weights
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.projections import latent_projection, output_projection, value_projection


def find_parts(event: Event, name: str, written: Trace) -> BlockParts:
    """The parts of the block that `event` is a call of; `written` is the trace of that call. Raises NotFiniteError
    where its output has NaN or infinite values: no probe inside the block could tell these from another fault."""
    block = event.module
    inside = set(block.modules())
    hidden = hidden_slot(event, written)
    shape = taken(event.args, event.kwargs, hidden.key).shape
    if hidden.turned or hidden.grid is not None:
        written.by_token(hidden, shape)
    stream = hidden.get(event.args, event.kwargs)
    if not bool(torch.isfinite(hidden.found(event.output, stream)).all()):
        raise NotFiniteError(f"{name} puts out values that are not finite")
    if hidden.streams > 1:  # the softmax of the block's own forward weighs streams
        own = [call for call in written.attention if call.module is block]
        if any(call.rows.tokens == stream.shape[1] for call in own):
            raise UnsupportedModelError(f"{name} attends in the forward that weighs its streams, not in a module")
        written.attention[:] = [call for call in written.attention if call.module is not block]
    cross = find_cross(event, hidden, written)
    other = set() if cross is None else {cross.module}
    attention = tuple(dict.fromkeys(c.module for c in written.attention if c.module in inside - other))
    intercepted = {c.module for c in written.attention if c.path == "softmax interception"}
    norms = _norms(block, written)
    apart = {block, *(inner for module in (*attention, *other) for inner in module.modules())}
    alike = [e for e in written.events if e.module not in apart and e.tensors and e.tensors[0].shape == shape]
    counts = {e.module: streams_weighed(e, norms) for e in alike}
    weighing = frozenset(module for module, count in counts.items() if count)
    units = tuple(nonlinear_units(block, written, {*attention, *other, *weighing}, norms))
    parts = BlockParts(
        name=name,
        module=block,
        hidden=hidden,
        beside=beside(event, hidden),
        attention=attention,
        intercepted=frozenset(intercepted & inside),
        inline=_inline(block, written, {*norms, *units}) if block in attention else (),
        norms=norms,
        units=units,
        cross=cross,
        weighing=weighing,
        streams=max([hidden.streams, *counts.values()]),
    )
    if len(attention) == 1:
        call = next(c for c in written.attention if c.module is attention[0])
        parts = replace(
            parts,
            value_projection=value_projection(stream, parts, written, call),
            output_projection=output_projection(parts, written, call),
            from_latent=latent_projection(handed(event.args, event.kwargs).values(), written, call),
        )
    return with_linears(with_projections(parts, event, written), written)


def _inline(block: nn.Module, written: Trace, others: set[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules without children that ran before the attention in the block's own forward ended, except `others` and
    what is inside them."""
    before = max(written.ended_before[id(call)] for call in written.attention if call.module is block)
    inside = {m for other in others for m in other.modules()}
    ran = dict.fromkeys(event.module for event in written.events[:before])
    return tuple(m for m in ran if m not in inside and not any(m.children()))


def _norms(block: nn.Module, written: Trace) -> dict[nn.Module, NormForm]:
    found: dict[nn.Module, NormForm] = {}
    for module in block.modules():
        calls = written.calls(module)
        if not calls or len(calls[0].tensors) != 1 or calls[0].result is None:
            continue
        if any(written.calls(child) for child in module.children()):
            continue
        ran = calls[0].unwritten()
        form = recognise(module, ran.tensors[0], needed(ran.result))
        if form is not None:
            found[module] = form
    return found


def nonlinear_units(
    module: nn.Module, written: Trace, attention: set[nn.Module], norms: dict[nn.Module, NormForm]
) -> Iterator[nn.Module]:
    """The largest nonlinear modules below `module` that hold none of `attention` and read one stream.

    Experts that are given the weights of a router beside them are a unit. The router is then none, because the weights
    that it gives are held.
    """
    called, routing = written.called(), _routing(written)
    for child in module.children():
        if child in attention or child in norms:
            continue
        if child not in called or any(m in attention for m in child.modules()):
            yield from nonlinear_units(child, written, attention, norms)
            continue
        event = written.calls(child)[0]
        if _is_affine(event) or _routes(event, routing) or _wraps_norm(event, written, norms):
            continue
        if _reads_one_stream(event) and not _holds_stream(event):
            if not any(child.children()) and scale_invariant(child, event.tensors[0]):
                raise UnsupportedModelError(
                    f"{type(child).__name__} ignores the scale of its input as a norm does, but cannot be frozen as one"
                )
            yield child
        else:
            yield from nonlinear_units(child, written, attention, norms)


def _wraps_norm(event: Event, written: Trace, norms: dict[nn.Module, NormForm]) -> bool:
    """Whether a module does nothing but call a norm inside it."""
    inner = (written.calls(module)[0] for module in event.module.modules() if module in norms)
    return any(equal(one.tensors[0], event.tensors[0]) and equal(one.result, event.result) for one in inner)


def in_order(units: Iterable[nn.Module], written: Trace) -> tuple[nn.Module, ...]:
    """The units in the order in which their calls ended."""
    order = {event.module: place for place, event in enumerate(written.events)}
    return tuple(sorted(units, key=lambda unit: order[unit]))


def _holds_stream(event: Event) -> bool:
    """Whether the unit adds its input to its output: a very large input outgrows any branch behind a norm."""
    if not any(event.module.children()) or event.result is None or event.result.shape != event.tensors[0].shape:
        return False
    far = 1e4 * random_like(event.tensors[0])
    with torch.no_grad():
        odd = wide(event.again(far)) - wide(event.again(-far))
    factor = (odd * wide(far)).sum() / wide(far).square().sum()
    return bool(factor.abs() > 1e-3) and relative_error(odd, factor * wide(far)) <= 1e-2


def mixes_tokens(event: Event, tokens: int) -> bool:
    """Whether changing the input of the first or the last token moves the output of another token."""
    x = event.tensors[0]
    if tokens < 2 or x.ndim < 2 or x.shape[-2] != tokens or event.result is None:
        return False

    def output(value: Tensor) -> Tensor:
        return event.again(value).reshape(tokens, -1)

    with torch.no_grad():
        base = output(x)
        for token, others in ((0, slice(1, None)), (tokens - 1, slice(0, -1))):
            changed = x.clone()
            changed[..., token, :] += random_like(x)[..., token, :]
            moved = (output(changed) - base)[others].abs().max()
            if float(moved) > 1e-4 * float(base.abs().max()):
                return True
    return False


def _reads_one_stream(event: Event) -> bool:
    routing = routing_weights(event.args, event.kwargs)
    streams = [t for t in event.tensors if t.ndim >= 2 and t is not routing and not _is_mask(t)]
    return len(streams) == 1 and event.result is not None


def _routing(written: Trace) -> dict[nn.Module, Tensor]:
    """The router weights that each experts module was given."""
    found = {event.module: routing_weights(event.args, event.kwargs) for event in written.events}
    return {experts: weights for experts, weights in found.items() if weights is not None}


def _routes(event: Event, routing: dict[nn.Module, Tensor]) -> bool:
    """Whether the module makes the router weights of experts outside it."""
    made = event.output if isinstance(event.output, (tuple, list)) else [event.output]
    inside = set(event.module.modules())
    theirs = [weights for experts, weights in routing.items() if experts not in inside]
    return any(isinstance(one, Tensor) and same_storage(one, weights) for one in made for weights in theirs)


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of an attention mask, (1, 1, N, N); some experts take one to leave out padding."""
    return tensor.ndim == 4 and tensor.shape[1] == 1 and tensor.shape[2] == tensor.shape[3]


def _is_affine(event: Event) -> bool:
    """Whether f(x + r) = f(x) + f(r) - f(0) at the captured input and a random vector r of its size, and
    f(-r) = 2 f(0) - f(r), which also holds where r moves f so much that nothing is seen of x."""
    if isinstance(event.module, nn.Linear) or not event.tensors or event.result is None:
        return True  # without hidden states to read, it is constant in the stream
    if event not in _affine:
        _affine[event] = _adds_up(event)
    return _affine[event]


_affine: WeakKeyDictionary[Event, bool] = WeakKeyDictionary()  # answers of `_is_affine`, which is asked often


def _adds_up(event: Event) -> bool:
    """As `_is_affine`. f(0) is subtracted on both sides, so that a bias hides no difference. Where the rounding of f(0)
    could make or hide a difference, the test is repeated in float64."""
    x = event.tensors[0]
    within = min(rounding(x.dtype), tolerance_for(x.dtype))
    with torch.no_grad():
        try:
            zero, apart, at_sum = _moves(event, x)
            affine = relative_error(apart, at_sum) <= within
            clear = torch.finfo(x.dtype).eps * zero.norm() <= within * at_sum.norm()
            if x.dtype == torch.float64 or (affine and clear):
                return affine
            if not affine and not relative_error(apart + zero, at_sum + zero) <= within:
                return False
            with _in_float64(event) as (again, wider):
                _, apart, at_sum = _moves(again, wider)
            return relative_error(apart, at_sum) <= within
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False


def _moves(event: Event, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f(0), then f(x) + f(r) and -f(-r), and f(x + r) and f(r), where f(0) is subtracted from each f; (2, ...)."""
    r = random_like(x)
    zero = wide(event.again(torch.zeros_like(x)))
    at_x, at_r, at_sum, at_minus = (wide(event.again(z)) - zero for z in (x, r, x + r, -r))
    return zero, torch.stack([at_x + at_r, -at_minus]), torch.stack([at_sum, at_r])


@contextlib.contextmanager
def _in_float64(event: Event) -> Iterator[tuple[Event, Tensor]]:
    """The call, and its first tensor, with all tensors and the module's weights in float64. No weight is written to."""
    wider = {id(t): t.double() for t in event.tensors}
    args = tuple(wider.get(id(a), a) for a in event.args)
    kwargs = {k: wider.get(id(v), v) for k, v in event.kwargs.items()}
    with contextlib.ExitStack() as stack:
        for module in event.module.modules():
            for name, held in [*parameters_of(module).items(), *buffers_of(module).items()]:
                if held is not None and held.is_floating_point():
                    stack.enter_context(standing_in(module, name, held.double()))
        yield Event(event.module, args, kwargs, event.output), wider[id(event.tensors[0])]


def with_linears(parts: BlockParts, written: Trace) -> BlockParts:
    """Find each unit's first linear layer and its output bias."""
    biases: dict[nn.Module, Tensor] = {}
    firsts: dict[nn.Module, nn.Module] = {}
    for unit in parts.units:
        event = written.calls(unit)[0]
        leaves = [e for m in unit.modules() for e in written.calls(m) if not any(m.children())]
        leaves = [e for e in written.events if e in leaves]
        bias = _output_bias(leaves, event)
        if bias is not None:
            biases[unit] = bias
        first = _first_linear(leaves, event)
        if first is not None:
            firsts[unit] = first
    block = written.events[-1]
    tokens = parts.hidden.get(block.args, block.kwargs).shape[1]
    mixing = frozenset(unit for unit in parts.units if mixes_tokens(written.calls(unit)[0], tokens))
    return replace(parts, unit_biases=biases, first_linears=firsts, mixing=mixing)


def _output_bias(leaves: list[Event], unit: Event) -> Tensor | None:
    """The vector that the bias of the last biased layer adds to the unit's output, (width,): the change without it.

    None where it adds nothing, or not the same to every token (the bias of an expert is part of that expert's term).
    """
    for leaf in reversed(leaves):
        bias = getattr(leaf.module, "bias", None)
        if leaf.module is unit.module or not isinstance(bias, Tensor) or not _is_affine(leaf):
            continue
        with torch.no_grad():
            kept, whole = bias.clone(), unit.again(unit.tensors[0]).clone()
            with standing_in(leaf.module, "bias", torch.zeros_like(bias)):
                added = whole - unit.again(unit.tensors[0])
            rows = added.reshape(-1, added.shape[-1])
            within = rounding(rows.dtype)
            same = relative_error(rows, rows[:1].expand_as(rows)) <= within
            if not same and wide(rows - rows[:1]).norm() <= within * wide(whole).norm():  # rounding, perhaps
                rows = _without_weight(leaf.module, unit, kept)
                same = relative_error(rows, rows[:1].expand_as(rows)) <= within
        exact = rows.shape[-1] == kept.numel() and relative_error(rows[0], kept) <= within
        return (kept if exact else rows[0]) if same and bool(rows.any()) else None
    return None


def _without_weight(layer: nn.Module, unit: Event, bias: Tensor) -> Tensor:
    """What the layer's bias adds to the unit's output, (tokens, width), with a weight of zero, so that a large output
    does not round the bias away. NaN where that is no affine map of the bias, or the layer has no weight of its own."""
    weight = {**parameters_of(layer), **buffers_of(layer)}.get("weight")

    def given(value: Tensor) -> Tensor:
        with standing_in(layer, "bias", value):
            output = unit.again(unit.tensors[0])
        return output.reshape(-1, output.shape[-1]).clone()

    if weight is None:
        return torch.full_like(given(bias), torch.nan)
    other = random_like(bias)
    with standing_in(layer, "weight", weight.new_zeros(()).expand_as(weight)):
        zero, alone, shifted, both = (given(v) for v in (torch.zeros_like(bias), bias, other, other + bias))
    affine = relative_error(both - shifted, alone - zero) <= rounding(bias.dtype)
    return alone - zero if affine else torch.full_like(alone, torch.nan)


def _first_linear(leaves: list[Event], unit: Event) -> nn.Module | None:
    """The linear layer that reads the unit's input and whose output the nonlinearity reads."""
    x = unit.tensors[0]
    linear = [
        e
        for e in leaves
        if e.module is not unit.module
        and e.tensors
        and isinstance(e.output, Tensor)
        and hasattr(e.module, "weight")
        and _is_affine(e)
    ]
    readers = [e for e in linear if same_storage(e.tensors[0], x)]
    for reader in readers:
        for e in leaves:
            if e.tensors and same_storage(e.tensors[0], reader.result) and not _is_affine(e):  # type: ignore[arg-type]
                return reader.module
    # An activation that is a plain function leaves no event; if there are two linear layers, they are W2 and W3.
    return readers[0].module if len(readers) == 1 and len(linear) == 2 else None

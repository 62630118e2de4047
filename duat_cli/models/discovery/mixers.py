"""Token mixers without softmax, found by what they do: they are linear in their values with everything else held.

A module is a mixer if its own code makes one tensor, the values, and later another, the result, such that

* the result is linear in the values, channel by channel, and carries them from token to token, while queries, keys,
  decays and gates stay as the module's own input sets them;
* between the result and the layer that gives the module's output there are only factors of channels and scales of
  norms.

Both are proved on random values; no names are used. The map from the stream to the values is part of the mixer if it is
affine and acts on each token alone; otherwise (a convolution with an activation, say) it is a UAT term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from duat_cli.models.arrays import equal, gaussian, relative_error, rounding, same_storage, wide
from duat_cli.models.block.linears import has_matrix
from duat_cli.models.block.mixer import Behind, Layout, MixerForm, Place
from duat_cli.models.block.parts import BlockParts, Projection, SecondMixer
from duat_cli.models.discovery.in_front import attention_in_front, is_one_product, without_attention
from duat_cli.models.discovery.kernels import alike, behind_of, is_whole, kernel_source, trials
from duat_cli.models.discovery.parts import in_order, mixes_tokens, nonlinear_units, with_linears
from duat_cli.models.instrument.mixer import FAULTS, MixerCall, MixerCode, Ran, is_repeated, repeated
from duat_cli.models.instrument.tape import Reached
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.projections import output_projection, value_projection

SEED = 37
MISSED = 4


def with_mixer(parts: BlockParts, event: Event, written: Trace, known: list[MixerForm]) -> BlockParts:
    """The block with a token mixer as its attention, if exactly one can be proved and the block has no attention that
    is one product of softmax rows and values. A block with such an attention may get a second mixer (`_with_second`).

    known: the forms proved so far, which are tried first; a newly proved form is added.
    """
    if not parts.attention:
        units = [unit for unit in parts.units if unit in parts.mixing] or [parts.module]
    elif len(parts.attention) == 1 and not is_one_product(parts, written):
        units = list(parts.attention)
    else:
        return _with_second(parts, event, written, known)
    proved = (_proved_of(parts, unit, written, known) for unit in units)
    found = [form for form in proved if form is not None]
    return _mixing(parts, found[0], event, written) if len(found) == 1 else parts


def _proved_of(parts: BlockParts, unit: nn.Module, written: Trace, known: list[MixerForm]) -> MixerForm | None:
    tried = (_form_of(module, written, known, ends) for module, ends in _candidates(parts, unit, written))
    return next((form for form in tried if form is not None), None)


def _with_second(parts: BlockParts, event: Event, written: Trace, known: list[MixerForm]) -> BlockParts:
    """The block with the one unit that mixes tokens beside its attention as a second mixer, if that can be proved.
    Where the output of attention reaches the stream through this unit alone, the unit is the block's only mixer."""
    if len(parts.attention) != 1 or len(parts.mixing) != 1 or parts.cross is not None:
        return parts
    (unit,) = parts.mixing
    form = _form_of(unit, written, known, ends=True)
    outer = attention_in_front(parts, unit, event, written)
    if outer is not None:
        return without_attention(parts, outer, written) if form is None else _mixing(parts, form, event, written, outer)
    if form is None or form.output is None:
        return parts
    last = written.calls(form.output)[0]
    output = Projection(form.output, _norm_behind(parts, last, written))
    firsts = {one: layer for one, layer in parts.first_linears.items() if one is not unit}
    return replace(parts, second=SecondMixer(form, output), first_linears=firsts)


def _candidates(parts: BlockParts, unit: nn.Module, written: Trace) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that may be the mixer, and whether the mixer is to end in its output layer: first those around the unit
    inside the block, from the innermost, then those inside the unit. All come with True, then again with False.

    unit: the block itself where none of its units is known to mix tokens (a unit may read a mask beside the stream).
    """
    block = parts.module
    around = [m for m in block.modules() if m is not block and any(inner is unit for inner in m.modules())]
    found = [*reversed(around), *(m for m in unit.modules() if m not in (unit, block) and any(m.children()))]
    if unit is block:
        found = [m for m in found if written.calls(m) and _mixes(written.calls(m)[0], parts, written)]
    yield from ((module, True) for module in found)  # `modules` goes from the outside
    yield from ((module, False) for module in found)


def _mixes(event: Event, parts: BlockParts, written: Trace) -> bool:
    block = written.events[-1]
    tokens = parts.hidden.get(block.args, block.kwargs).shape[1]
    return bool(event.tensors) and mixes_tokens(event, tokens)


def _mixing(
    parts: BlockParts, form: MixerForm, event: Event, written: Trace, outer: nn.Module | None = None
) -> BlockParts:
    """The block with this mixer as its attention. outer: a module in front of the mixer that counts as one unit,
    whatever it reads."""
    replaced, fronts = {*parts.attention, form.module}, [] if outer is None else [outer]
    around = nonlinear_units(parts.module, written, {form.module, *fronts, *parts.weighing}, parts.norms)
    units = in_order([*around, *fronts, *([] if form.affine else [form.module])], written)
    found = with_linears(replace(parts, attention=(form.module,), intercepted=frozenset(), units=units), written)
    inside = set(form.module.modules())
    found = replace(
        found,
        mixer=form,
        mixing=found.mixing - inside if form.affine else found.mixing - inside | {form.module},
        unit_biases={unit: bias for unit, bias in found.unit_biases.items() if unit not in inside},
        first_linears={unit: layer for unit, layer in found.first_linears.items() if unit not in inside},
    )
    call = _capture(form, written)
    written.attention[:] = [c for c in written.attention if c.module not in replaced]
    written.attention.append(call.attention())
    last = written.calls(form.module if form.output is None else form.output)[0]
    written.ended_before[id(written.attention[-1])] = written.events.index(last)
    found = replace(found, output_projection=_output_projection(form, found, last, written))
    if not form.affine:
        return found
    value = replace(written.attention[-1], value=_as_made(form, written, call))
    hidden = parts.hidden.get(event.args, event.kwargs)
    return replace(found, value_projection=value_projection(hidden, found, written, value))


def _output_projection(form: MixerForm, parts: BlockParts, last: Event, written: Trace) -> Projection | None:
    if form.output is None:
        return output_projection(parts, written, written.attention[-1])
    return Projection(form.output, _norm_behind(parts, last, written))


def _norm_behind(parts: BlockParts, last: Event, written: Trace) -> nn.Module | None:
    """The norm that reads this layer's output, if there is one."""
    behind = [e for e in written.events[written.events.index(last) :] if e.module in parts.norms and e.tensors]
    reads = (e.module for e in behind if last.result is not None and same_storage(e.tensors[0], last.result))
    return next(reads, None)


def _as_made(form: MixerForm, written: Trace, call: MixerCall) -> Tensor:
    """The values as the trace holds them, (1, heads, N, d), in the memory of the linear layer's output."""
    for event in reversed(written.events):
        made = event.result
        if made is None or event.module not in set(form.module.modules()) or made.shape[:2] != call.value.shape[:2]:
            continue
        for first in range(0, made.shape[-1] - call.value.shape[-1] + 1, max(1, call.value.shape[-1])):
            part = made[..., first : first + call.value.shape[-1]]
            if equal(form.behind.held(part), call.value):
                return part.unflatten(-1, (-1, form.width)).transpose(1, 2)
    return call.by_head(call.value).transpose(1, 2)


def _capture(form: MixerForm, written: Trace) -> MixerCall:
    event = written.calls(form.module)[0]
    with torch.no_grad():
        return MixerCall.capture(form, form.module.forward, event.args, event.kwargs)


def _form_of(module: nn.Module, written: Trace, known: list[MixerForm], ends: bool) -> MixerForm | None:
    calls = written.calls(module)
    if len(calls) != 1 or not calls[0].tensors or calls[0].tensors[0].ndim != 3 or calls[0].result is None:
        return None
    event = calls[0]
    output = _output_layer(module, event, written)
    if (output is not None) != ends:
        return None
    with torch.no_grad():
        search = _Search.of(module, output, event)
        if search is None:
            return None
        for form in known:
            found = search.tried(form) if (form.output is not None) == ends else None
            if found is not None:
                return found
        found = search.found()
    if found is None:
        return None
    known.append(found)
    return found


def _output_layer(module: nn.Module, event: Event, written: Trace) -> nn.Module | None:
    """The linear layer, called once, whose output is the module's own."""
    inside = set(module.modules())
    for last in reversed(written.events):
        if last.module in inside and has_matrix(last.module) and equal(last.result, event.result):
            return last.module if len(written.calls(last.module)) == 1 else None
    return None


class _Search:
    """The code of one possible mixer, run on its own input and with other values in place of its own."""

    def __init__(self, code: MixerCode, stream: Tensor, plain: Ran, channels: int) -> None:
        """stream: the module's input, (1, N, M). plain: its own run, with every tensor that has as many entries as the
        output layer reads, or an integer fraction of that. channels: how many channels the layer reads."""
        self._code, self._stream, self._plain, self._channels = code, stream, plain, channels
        self._tokens = stream.shape[1]
        self._spread = False  # whether the values proved last are an affine map of the streams of several tokens
        self._results: frozenset[Place] = frozenset()  # the places that may hold a kernel's result
        self._made: dict[tuple[tuple[Place, ...], int], dict[Place, Tensor]] = {}  # as `_trials_of` makes them

    @classmethod
    def of(cls, module: nn.Module, output: nn.Module | None, event: Event) -> _Search | None:
        """The search in this module; None where its code cannot be run in this way, or where its output layer does not
        read one vector for each token."""
        stream = event.tensors[0]
        tokens, blank = stream.shape[1], Layout(1, ())
        draft = MixerForm(module, output, (Place(0, None),), (blank,), Place(0, None), blank, 1, Behind(None), False)
        code = MixerCode(draft, module.forward, event.args, event.kwargs)

        def fits(_place: Place, tensor: Tensor) -> bool:
            return tensor.ndim > 1 and tokens in tensor.shape[1:] and size % max(1, tensor.numel()) == 0

        try:
            arrived = code.run().arrived
            if arrived is None or arrived.shape[-2] != tokens:
                return None
            size = arrived.numel()
            return cls(code, stream, code.run(keep=fits), size // tokens)
        except FAULTS:
            return None

    def found(self) -> MixerForm | None:
        """The form with the first values, in the order in which they are made, that can be proved, and with the first
        result that is made of them."""
        # of the parts of one split, the last comes first
        places = sorted(self._plain.tensors, key=lambda p: (p.operation, -(p.element or 0)))
        whole = [place for place in places if self._plain.tensors[place].numel() == self._tokens * self._channels]
        behind = self._behind(whole)
        self._results, self._made = frozenset(behind), {}
        fallback = None
        for value in (*whole, *(place for place in places if place not in whole)):  # heads may share values
            results = [place for place in places if place in behind and place.operation > value.operation]
            fallback = self._proved((value,), results, behind)
            if fallback is not None and not self._spread:
                return fallback
            if fallback is not None:  # layers in front mix tokens to make these values
                break
        parts = [place for place in places if place not in whole]
        for result in sorted(behind, key=lambda place: place.operation):
            several = self._several(parts, result)
            form = None if several is None else self._proved(several, [result], behind)
            if form is not None:
                return form
        return fallback

    def _several(self, places: list[Place], result: Place) -> tuple[Place, ...] | None:
        """Values that several layers make: in order, each tensor that some channels of the result, not covered so far,
        are a kernel of; None where some channels stay uncovered."""
        found: list[Place] = []
        open_channels = torch.ones(self._channels, dtype=torch.bool)
        for place in (one for one in places if one.operation < result.operation):
            source = self._source((place,), result)
            if source is None or not source.numel():
                continue
            made = (source >= 0).cpu()
            if bool((made & ~open_channels).any()):
                continue
            found.append(place)
            open_channels &= ~made
            if not bool(open_channels.any()):
                return tuple(found)
        return None

    def _behind(self, places: list[Place]) -> dict[Place, Behind]:
        """The places that may hold a kernel's result, searched backwards from the last. The search ends at the kernel
        itself: where `MISSED` places in a row hold none."""
        found: dict[Place, Behind] = {}
        missed = 0
        for place in reversed(places):
            behind = self._behind_of(place)
            if behind is not None:
                found[place], missed = behind, 0
            elif found and (missed := missed + 1) >= MISSED:
                break
        return found

    def tried(self, form: MixerForm) -> MixerForm | None:
        """The form with the places of `form`, a mixer proved before, if they can be proved here."""
        result = form.result_of(self._plain.count)
        if not all(place in self._plain.tensors for place in (*form.value, result)):
            return None
        behind = self._behind_of(result)
        self._results, self._made = frozenset([result]), {}
        return None if behind is None else self._proved(form.value, [result], {result: behind})

    def _layout(self, place: Place) -> Layout:
        return Layout.of(self._plain.tensors[place], self._tokens)

    def _behind_of(self, place: Place) -> Behind | None:
        """The `Behind` between this tensor and the output layer; None where something else stands there."""
        layout = self._layout(place)

        def arrived(items: Tensor) -> Tensor | None:
            try:
                ran = self._code.run(items=len(items), exchanged={place: layout.lay(items)})
            except FAULTS:
                return None
            if ran.arrived is None or ran.arrived.numel() != items.numel():
                return None
            return wide(ran.arrived).reshape(items.shape)

        return behind_of(arrived, layout.by_token(self._plain.tensors[place]))

    def _source(self, values: tuple[Place, ...], result: Place) -> Tensor | None:
        """The channel of these values that each channel of the result is a kernel of, as `kernel_source` returns it; an
        empty tensor where the result is not made of these values."""
        held = self._plain.held
        behind = (number for number, t in held.items() if values[0].operation < number and not is_repeated(t))
        before = min(behind, default=self._plain.count)
        if result.operation in held or result.operation > before:  # then one run does not serve this result and others
            before = result.operation
        if (key := (values, before)) not in self._made:
            self._made[key] = self._trials_of(values, before)
        made, own = self._made[key].get(result), self._plain.tensors[result]
        if made is None:
            return own.new_empty(0)
        onto = self._layout(result)
        return kernel_source(wide(onto.by_token(made)), wide(onto.by_token(own)))

    def _trials_of(self, values: tuple[Place, ...], before: int) -> dict[Place, Tensor]:
        """What the `trials` of these values make of each place that may hold the result, in one run, since what is held
        behind a result leaves it as it is; empty where the code cannot be run. before: the operation that ends holding.
        """
        layouts, tensors = [self._layout(value) for value in values], self._plain.tensors
        own = torch.cat([at.by_token(tensors[value]) for at, value in zip(layouts, values, strict=True)], dim=-1)
        tried = trials(own)
        laid = tried.split([self._numbers((value,)) for value in values], dim=-1)
        exchanged = {value: at.lay(part) for value, at, part in zip(values, layouts, laid, strict=True)}
        held = {number: t for number, t in self._plain.held.items() if values[0].operation < number < before}
        try:
            ran = self._code.run(
                items=len(tried),
                exchanged=exchanged,
                held={n: repeated([t], len(tried))[0] for n, t in held.items()},
                keep=lambda place, _tensor: place in self._results,
            )
        except FAULTS:
            return {}
        made = ran.tensors if ran.count == self._plain.count else {}
        return {place: t for place, t in made.items() if t.numel() == len(tried) * tensors[place].numel()}

    def _proved(self, values: tuple[Place, ...], results: list[Place], behind: dict[Place, Behind]) -> MixerForm | None:
        """The form with these values and the first of these results that is made of them; None where that is no linear
        kernel of all of them."""
        for result in results:
            source = self._source(values, result)
            if source is None or (source.numel() and not is_whole(source, self._numbers(values))):
                return None
            if source.numel():
                return self._form(values, result, behind[result], source)
        return None

    def _numbers(self, values: tuple[Place, ...]) -> int:
        """How many entries these values have for each token."""
        return sum(self._plain.tensors[value].numel() for value in values) // self._tokens

    def _form(self, values: tuple[Place, ...], result: Place, behind: Behind, source: Tensor) -> MixerForm | None:
        channels = torch.arange(self._numbers(values), device=source.device)
        form = replace(
            self._code.form,
            value=values,
            value_layout=tuple(map(self._layout, values)),
            result=Place(self._plain.count - result.operation, result.element),
            result_layout=self._layout(result),
            behind=behind,
            source=None if torch.equal(source, channels) else source,
        )
        try:
            call = MixerCall.capture(form, self._code.forward, self._code.args, self._code.kwargs)
            H = call.impulses()  # the form still has one channel per head
        except FAULTS:
            return None
        form = replace(form, once=call.broadcasts(H))
        width = next(n for n in range(len(H), 0, -1) if len(H) % n == 0 and alike(H, n))
        if width % (behind.centred or 1):  # the mean of channels that differ in their H is no mean of values
            return None
        affine = self._affine(call)
        return None if form.source is not None and not affine else replace(form, width=width, affine=affine)

    def _affine(self, call: MixerCall) -> bool:
        """Whether the values are an affine map of the stream. Sets `_spread`."""
        x = self._stream
        noise = gaussian(tuple(x.shape), x, SEED + 5)
        moved = x.clone()
        moved[:, 0] += noise[:, 0]
        found = []
        for z in (torch.zeros_like(x), x, noise, x + noise, moved):
            try:
                found.append(wide(call.values_at(z)))
            except (*FAULTS, Reached):
                return False
        zero, at_x, at_noise, at_sum, changed = found
        additive = relative_error(at_x + at_noise - zero, at_sum) <= rounding(x.dtype)
        apart = relative_error(changed[:, 1:], at_x[:, 1:]) <= rounding(x.dtype)
        self._spread = additive and not apart
        return additive

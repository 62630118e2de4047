"""One call of a token mixer without softmax, and the same mixer as a linear map of its values.

The mixer's own code is run again on its own input with other values in place of its values. This holds everything else
that the input sets (queries, keys, decays, gates, scales of norms). H follows from impulses: the kernel applied to
V = I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import fit, random_signs, relative_error, tolerance_for, wide
from duat_cli.models.block.mixer import MixerForm, Place
from duat_cli.models.block.slots import joined, parted
from duat_cli.models.budgets import IMPULSES
from duat_cli.models.instrument.attention import AttentionCall, RowSource, apply_rows, unwatched
from duat_cli.models.instrument.calls import first_tensor
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.tape import Reached, Tape
from duat_cli.text import plural

SEED = 31
_REORDERED = 64  # tolerance in roundings of the largest entry, for sums that are computed in another order
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, UnsupportedModelError)
"""Errors of foreign code that is given values, or a number of items, that it was not written for."""


@dataclass(frozen=True)
class Ran:
    """One run of a mixer's code."""

    tensors: dict[Place, Tensor]  # the tensors that were asked for
    held: dict[int, Tensor]  # outputs of its squashing functions and layers, by number of the operation
    arrived: Tensor | None  # the input of the output layer; without one, the module's output
    output: Any
    count: int  # number of operations


@dataclass(frozen=True)
class MixerCode:
    """A mixer's own code with the arguments of one call."""

    form: MixerForm
    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def run(
        self,
        *,
        items: int = 1,
        exchanged: Mapping[Place, Tensor] | None = None,
        held: Mapping[int, Tensor] | None = None,
        keep: Callable[[Place, Tensor], bool] = lambda _place, _tensor: False,
        until: Place | None = None,
    ) -> Ran:
        """Runs the code on `items` copies of the arguments. keep: which tensors to return. exchanged, held, until: as
        in `Tape`; raises Reached at `until`."""
        tensors: dict[Place, Tensor] = {}
        constants: dict[int, Tensor] = {}
        arrived: list[Tensor] = []

        def seen(place: Place, holdable: bool, tensor: Tensor) -> None:
            if keep(place, tensor):
                tensors[place] = tensor
            if holdable and place.element is None:
                constants[place.operation] = tensor

        def at_output(_module: Any, args: Any, _kwargs: Any) -> None:
            arrived.append(args[0])

        args = repeated(self.args, items)
        kwargs = dict(zip(self.kwargs, repeated(self.kwargs.values(), items), strict=True))
        tape = Tape(seen, exchanged=exchanged, held=held, until=until)
        layer = self.form.output
        with hooked([] if layer is None else [layer], at_output), unwatched(), tape:
            try:
                output = self.forward(*args, **kwargs)
            except Reached as reached:
                reached.kept = tensors
                raise
        if layer is None:
            arrived.append(parted(output)[0])
        return Ran(tensors, constants, arrived[0] if len(arrived) == 1 else None, output, tape.count)


def repeated(values: Any, items: int) -> tuple[Any, ...]:
    """The arguments with each tensor of one item expanded to `items` copies."""

    def copies(value: Any) -> Any:
        return value.expand(items, *value.shape[1:]) if items > 1 and is_repeated(value) else value

    return tuple(map(copies, values))


def is_repeated(value: Any) -> bool:
    """Whether `repeated` makes copies of this value: whether it is a tensor of one item."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1


@dataclass(frozen=True)
class KernelRows:
    """H of a mixer, computed from impulses when it is first asked for, then kept."""

    call: MixerCall
    heads: int
    tokens: int
    _made: list[Tensor] = field(default_factory=list)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        if not self._made:
            self._made.append(self.call.impulses())
        yield slice(0, self.tokens), self._made[0]


@dataclass(frozen=True)
class MixerCall:
    """One call of a mixer: its values, its kernel's result, and the factors of the channels behind the kernel."""

    code: MixerCode
    read: Tensor  # its input, the stream, (1, N, M)
    value: Tensor  # (1, N, channels)
    result: Tensor  # (1, N, channels)
    gate: Tensor  # (1, N, channels)
    output: Any
    held: dict[int, Tensor]  # as in `Ran`, between values and result
    count: int  # number of operations

    @property
    def form(self) -> MixerForm:
        return self.code.form

    @classmethod
    def capture(
        cls, form: MixerForm, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> MixerCall:
        """Runs the mixer and finds the factors behind its kernel. Raises UnsupportedModelError where the code behind it
        does more than scale channels."""
        code = MixerCode(form, forward, args, kwargs)
        read = needed(first_tensor(args, kwargs))
        recent: dict[Place, Tensor] = {}

        def keep(place: Place, tensor: Tensor) -> bool:
            recent[place] = tensor  # the result counts from the last operation, whose number is not known yet
            for old in [known for known in recent if known.operation < place.operation - form.result.operation]:
                del recent[old]
            return place in form.value

        ran = code.run(keep=keep)
        place = form.result_of(ran.count)
        result = recent.get(place)
        if not all(one in ran.tensors for one in form.value) or result is None or ran.arrived is None:
            raise UnsupportedModelError(f"{type(form.module).__name__} runs other operations than when it was proved")
        value = form.values([ran.tensors[one].detach() for one in form.value])
        by_token = value, form.behind.held(form.result_layout.by_token(result.detach()))
        if by_token[0].shape != by_token[1].shape:
            name, tokens = type(form.module).__name__, plural(read.shape[1], "token")
            length = "more tokens" if read.shape[1] == 1 else "another length"
            raise UnsupportedModelError(
                f"{name} runs other operations on {tokens} than when it was proved; give prompts of {length}"
            )
        gate = gates(code, place, ran.held, by_token[1], ran.arrived.detach())
        first = form.value[0].operation
        held = {number: tensor for number, tensor in ran.held.items() if first < number < place.operation}
        return cls(code, read, by_token[0].clone(), by_token[1].clone(), gate, ran.output, held, ran.count)

    def _at_once(self) -> int:
        """How many items go through the kernel together."""
        return max(1, IMPULSES // self.value.numel())

    def mix(self, values: Tensor) -> Tensor:
        """The kernel's result for other values, (items, N, channels) both."""
        place = self.form.result_of(self.count)
        found = []
        for some in values.split(self._at_once()):
            laid = dict(zip(self.form.value, self.form.lay(some), strict=True))
            try:
                items = 1 if self.form.once else len(some)
                held = {number: repeated([tensor], items)[0] for number, tensor in self.held.items()}
                self.code.run(items=items, exchanged=laid, held=held, until=place)
            except Reached as reached:
                found.append(self.form.result_layout.by_token(reached.tensor).to(values.dtype))
        return torch.cat(found)

    def values_at(self, stream: Tensor) -> Tensor:
        """The values, (items, N, channels), that the mixer makes of another stream, (items, N, M)."""
        own = [stream if a is self.read else a for a in self.code.args]
        named = {k: stream if a is self.read else a for k, a in self.code.kwargs.items()}
        code = MixerCode(self.form, self.code.forward, tuple(own), named)
        *before, last = self.form.value
        try:
            code.run(items=len(stream), keep=lambda place, _tensor: place in before, until=last)
        except Reached as reached:
            return self.form.values([*(reached.kept[place] for place in before), reached.tensor])
        raise UnsupportedModelError(f"{type(self.form.module).__name__} runs other operations than when it was proved")

    def by_head(self, vectors: Tensor) -> Tensor:
        """Vectors (items, N, channels) as (items, N, heads, d)."""
        return vectors.unflatten(-1, (-1, self.form.width))

    def returning(self, mixed: Tensor) -> Any:
        """The mixer's output for `mixed`, (items, N, heads, d), as the result of its kernel."""
        scaled, (own, rest) = mixed.flatten(2) * self.gate, parted(self.output)
        if self.form.output is None:
            return joined(scaled.to(own.dtype), rest)
        parameter = next(p for p in self.form.output.parameters() if p.is_floating_point())
        return joined(self.form.output(scaled.to(parameter.dtype)), rest)

    def attention(self) -> AttentionCall:
        """This call as a call of attention, whose H is computed when it is asked for."""
        value, result = self.by_head(self.value).transpose(1, 2), self.by_head(self.result)
        rows = KernelRows(self, result.shape[2], result.shape[1])
        return AttentionCall(self.form.module, "frozen kernel", rows, value, result)

    @torch.no_grad()
    def impulses(self) -> Tensor:
        """H, (heads, N, N). In item k, channel a of every head carries the impulse of token k d + a.

        Raises UnsupportedModelError where H does not give the kernel's own result.
        """
        _, tokens, channels = self.value.shape
        width, heads = self.form.width, channels // self.form.width
        H = self.value.new_empty(heads, tokens, tokens)
        step = width * self._at_once()
        for first in range(0, tokens, step):
            some = torch.arange(first, min(first + step, tokens), device=self.value.device)
            impulses = self.value.new_zeros(-(-len(some) // width), tokens, heads, width)
            impulses[(some - first) // width, some, :, some % width] = 1.0
            answers = self.by_head(self.mix(impulses.flatten(2)))  # (items, N, heads, d)
            H[..., first : first + len(some)] = answers.permute(2, 1, 0, 3).flatten(2)[..., : len(some)]
        again = H @ self.by_head(self.value)[0].transpose(0, 1)  # (heads, N, d)
        error = relative_error(wide(again).transpose(0, 1), wide(self.by_head(self.result)[0]))
        if not error <= tolerance_for(self.value.dtype):
            raise UnsupportedModelError(
                f"the kernel of {type(self.form.module).__name__} is not the H that impulses show (error {error:.1e})"
            )
        return H

    def broadcasts(self, H: Tensor) -> bool:
        """Whether the code gives the same H, up to rounding, when tensors that do not depend on the values have one
        item. It does for a scan; a convolution of one item may sum in another order."""
        form = replace(self.form, once=True)
        try:
            shown = replace(self, code=replace(self.code, form=form)).impulses()
            return relative_error(shown, H) <= _REORDERED * torch.finfo(H.dtype).eps
        except FAULTS:
            return False


def with_rows(
    form: MixerForm, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowSource
) -> Any:
    """The mixer's output with this H in place of its kernel's, and everything else live."""
    code = MixerCode(form, forward, args, kwargs)
    ran = code.run(keep=lambda place, _tensor: place in form.value)
    value = form.values([ran.tensors[place] for place in form.value]).unflatten(-1, (-1, form.width))
    mixed = apply_rows(rows, value.transpose(1, 2)).flatten(2)
    return code.run(exchanged={form.result_of(ran.count): form.result_layout.lay(mixed)}).output


def gates(code: MixerCode, place: Place, held: Mapping[int, Tensor], result: Tensor, arrived: Tensor) -> Tensor:
    """The factor of every channel between the kernel's result and the output layer, (1, N, channels).

    Marks in place of the result show the factors without the scale of a norm; the call's own result shows that scale.
    """
    form, scaled = code.form, code.form.behind.scaled
    put = marks(result, form.behind.centred)
    ran = code.run(exchanged={place: form.result_layout.lay(put)})
    if ran.arrived is None:
        raise UnsupportedModelError("its output layer is not called once")
    factors, own = wide(ran.arrived.detach()).reshape(put.shape) / wide(put), wide(arrived).reshape(put.shape)
    if scaled is not None:
        grouped = [t.unflatten(-1, (-1, scaled)) for t in (factors * wide(result), own)]
        scale = fit(grouped[0], grouped[1])
        factors = (factors.unflatten(-1, (-1, scaled)) * scale).flatten(2)
    error = relative_error(factors * wide(result), own)
    if not error <= tolerance_for(arrived.dtype):
        raise UnsupportedModelError(
            f"what stands behind the kernel of {type(form.module).__name__} is no scale of its channels ({error:.1e})"
        )
    return factors


def marks(like: Tensor, centred: int | None) -> Tensor:
    """Vectors of channels from whose images the factors can be read: random signs. Where groups of `centred` channels
    lose their mean: 1 and -1 in turn (in a group of odd size 2, -1, -1 first), with one random sign per group."""
    signs = random_signs(like, SEED)
    if centred is None:
        return signs
    group = like.new_ones(centred)
    group[1::2] = -1.0
    if centred % 2:
        group[:3] = like.new_tensor([2.0, -1.0, -1.0])
        group[3::2], group[4::2] = 1.0, -1.0
    return (signs.unflatten(-1, (-1, centred))[..., :1] * group).flatten(-2)

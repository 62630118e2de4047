"""Records of one call of a block, and the inputs and results of its replays."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import parted
from duat_cli.models.holding import holding
from duat_cli.models.instrument.activations import Extremes, bounds_of
from duat_cli.models.instrument.attention import AttentionCall, RowSource, StoredRows, allowed_by, apply_rows
from duat_cli.models.instrument.interception import HeldClamp
from duat_cli.models.instrument.mixer import MixerCall
from duat_cli.models.instrument.windows import WindowRows, Windows, asked_streams, laid, tokens_at, window_rows

if TYPE_CHECKING:
    from duat_cli.models.instrument.rig import Rig


class ReplayStop(Exception):  # noqa: N818 - a signal, not an error
    """Ends a replay as soon as the attention function has seen the values."""


@dataclass(frozen=True)
class UnitCall:
    """One call of an FFN unit: its input, its output and what else it returned (router logits, say)."""

    module: nn.Module
    input: Tensor
    output: Tensor
    rest: tuple[Any, ...] | None
    behind_attention: bool  # whether attention had run before it
    again: Callable[[], Any]  # calls the module once more, with all of its own arguments


def handed_values(call: AttentionCall, x: Tensor) -> UnitCall:
    """The values that an earlier block hands on, as the output of a unit. x: the input of the attention module."""
    return UnitCall(call.module, x, call.value, None, False, functools.partial(call.module, x))


@dataclass(frozen=True)
class CrossCall:
    """One call of cross-attention: its arguments, and its H over the encoder's tokens."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    states: Tensor  # the encoder's states, (1, K, width)
    attention: AttentionCall


@dataclass
class Recording:
    """Records of one call of a block, by module and in call order."""

    norms: dict[nn.Module, list[FrozenNorm]] = field(default_factory=lambda: defaultdict(list))
    norm_rests: dict[nn.Module, list[tuple[Any, ...] | None]] = field(default_factory=lambda: defaultdict(list))
    units: list[UnitCall] = field(default_factory=list)
    linears: dict[nn.Module, Tensor] = field(default_factory=dict)  # first linear -> its output
    attention: list[AttentionCall] = field(default_factory=list)
    gates: dict[nn.Module, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # of gated attention
    weights: list[Tensor] = field(default_factory=list)  # of streams, where a token has several
    clamps: dict[nn.Module, list[HeldClamp]] = field(default_factory=lambda: defaultdict(list))  # of clipped attention
    extremes: Extremes = field(default_factory=Extremes)  # those of norms' and attention's outputs
    attention_rests: dict[nn.Module, tuple[Any, ...] | None] = field(default_factory=dict)  # attention's other outputs
    mixers: dict[nn.Module, MixerCall] = field(default_factory=dict)  # calls of mixers without softmax
    second: Callable[[], MixerCall] | None = None  # captures the call of a mixer beside attention
    crossing: list[AttentionCall] = field(default_factory=list)  # calls of cross-attention
    cross: CrossCall | None = None


@dataclass
class Replay:
    """The result of replaying a block on a batch of items; the first axis of every tensor is the items."""

    output: Tensor | None = None  # (items, N, M)
    values: list[Tensor] = field(default_factory=list)  # one per attention call: (items, kv_heads, N, d)
    mixed: list[Tensor] = field(default_factory=list)  # H V, one per attention call: (items, N, heads, d)
    unit_inputs: list[Tensor] = field(default_factory=list)  # one per unit call: (items, N, width)
    points: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # inputs of norms, units, behind attention

    @property
    def places(self) -> list[tuple[nn.Module | None, Tensor]]:
        """All points, with the block's output as the last."""
        return [*self.points, (None, self.end)]

    @property
    def end(self) -> Tensor:
        """The output of a replay that was not stopped on its way."""
        assert self.output is not None
        return self.output


@dataclass
class Substitutes:
    """The tensors that a replay in progress puts in place of computed ones."""

    run: BlockRun  # the run that is replayed
    items: int
    given: Sequence[Tensor]  # the output of each unit call, in call order
    attention: Tensor | None  # (items, N, heads, d), in place of H V
    stop_at_values: bool
    calls_of: Sequence[AttentionCall]  # the calls whose H is held, in call order
    prompts: int = 1  # how many prompts follow one another in the tokens of an item
    result: Replay = field(default_factory=Replay)
    calls: dict[nn.Module, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    """The numbers of the next calls of each norm."""
    unit_calls: int = 0
    attention_calls: int = 0
    windows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (values, mixed), one per window called so far

    def by_item(self, x: Tensor) -> Tensor:
        """The tensor as (items, N or N * heads, width), however the model folds batch and tokens."""
        return x.reshape(self.items, -1, x.shape[-1])

    def held(self, norm: FrozenNorm, x: Tensor) -> Tensor:
        """The frozen norm of a replay's tensor, with the items in front of the prompts."""
        return norm(x) if self.prompts == 1 else norm(x.unflatten(0, (self.items, -1))).flatten(0, 1)

    def passed(self, module: nn.Module, x: Tensor) -> None:
        """Records the input of a norm or a unit as a point, unless it stands in front of attention."""
        if self.attention_calls or not self.run.attention:
            self.result.points.append((module, self.by_item(x)))

    def next_given(self) -> Tensor:
        """The output of the next unit call, in the layout of the model's code."""
        self.unit_calls += 1
        return self.given[self.unit_calls - 1].flatten(0, 1)

    def next_mixed(self, values: Tensor, mix: Callable[[], Tensor]) -> Tensor:
        """The output of the next attention call by token, (items, N, heads, d): `mix()`, or `attention` if given."""
        self.attention_calls += 1
        self.result.values.append(values)
        if self.stop_at_values:
            raise ReplayStop
        # a view of its own for every call, so that gradients tell the calls apart
        mixed = mix() if self.attention is None else self.attention.view_as(self.attention)
        self.result.mixed.append(mixed)
        return mixed.clone()  # some modules write to it in place

    def once_each(self, linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """linear(x), x (items, N, width), computed once for equal items, and at one token for items of zeros.

        linear: acts on each token alone. While gradients are recorded every item is computed, for its own graph.
        """
        if self.items == 1 or len(x) != self.items or x.ndim != 3 or torch.is_grad_enabled():
            return linear(x)
        items, kept, places = x.unbind(), list[int](), list[int]()
        for number, item in enumerate(items):
            same = next((k for k in kept if torch.equal(items[k], item)), number)
            places.append(same)
            if same == number:
                kept.append(number)
        if len(kept) == self.items:
            return linear(x)
        moving = [k for k in kept if bool(items[k][0].any()) or bool(items[k].any())]
        images = dict(zip(moving, linear(x[moving]), strict=True)) if moving else {}
        for k in kept:
            if k not in images:
                images[k] = linear(x[k : k + 1, :1])[0].expand(x.shape[1], -1)
        return torch.stack([images[place] for place in places])

    def one_window(self, rows: RowSource, windows: Windows, value: Tensor) -> Tensor:
        """H V of the next window, (1, n, heads, d), where each has its own call; the last completes the attention."""
        assert windows.sizes is not None
        number = len(self.windows)
        size = windows.sizes[number]
        if self.attention is not None:
            mixed = windows.outward(self.attention)[number : number + 1, :size].clone()
        elif isinstance(rows, WindowRows):
            mixed = apply_rows(StoredRows(rows.weights[number, :, :size, :size]), value)
        else:
            raise UnsupportedModelError("each window of its attention has a call of its own: no other H can be held")
        self.windows.append((value[0], mixed[0]))
        if len(self.windows) == windows.count:
            values, together = zip(*self.windows, strict=True)
            self.next_mixed(windows.inward(laid(values)), lambda: windows.inward_mixed(laid(together)))
        return mixed


def stacked(singles: list[Replay]) -> Replay:
    first = singles[0]

    def cat(name: str) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*(getattr(s, name) for s in singles), strict=True)]

    points = [(module, torch.cat([s.points[k][1] for s in singles])) for k, (module, _) in enumerate(first.points)]
    output = None if first.output is None else torch.cat([s.output for s in singles if s.output is not None])
    return Replay(output, cat("values"), cat("mixed"), cat("unit_inputs"), points)


class BlockRun:
    """One block on one input: a record of what it did, and its replay as an affine map.

    The input may be a batch of prompts of equal length. Their tokens then follow one another, N of them in all, and
    attention is one of windows: each prompt's rows of H see its own tokens alone.
    """

    def __init__(
        self,
        rig: Rig,
        index: int,
        parts: BlockParts,
        recording: Recording,
        call: tuple[Sequence[Any], dict[str, Any]],
        output: Tensor,
        prompts: int = 1,
    ) -> None:
        """output: (prompts, N / prompts, M), in the layout of the model's code."""
        self._rig, self.call, self.prompts = rig, call, prompts
        self.index, self.parts, self.recording = index, parts, recording
        self.input: Tensor = self._in_one(parts.hidden.get(*call))  # (1, N, M)
        self.output = self._in_one(output)  # (1, N, M)

    def _in_one(self, x: Tensor) -> Tensor:
        """A batch of prompts, (prompts, N / prompts, M), as one item, (1, N, M)."""
        return x if self.prompts == 1 else x.flatten(0, 1)[None]

    def asking(self, asked: Callable[[Tensor, Tensor], None]) -> contextlib.AbstractContextManager[None]:
        """While active, replays make queries and keys too and show them: (items, heads, N, d), keys by kv head."""
        return holding(self._rig.watch, asked=asked)

    def looking(self, looked: Callable[[Tensor], None]) -> contextlib.AbstractContextManager[None]:
        """While active, replays show the weights of an intercepted softmax, (…, heads, N, N), before H stands there."""
        return holding(self._rig.watch, looked=looked)

    @functools.cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest entry of each prompt's output, (prompts,) each; NaN where an entry is NaN."""
        return bounds_of(self.output, self.prompts)

    @functools.cached_property
    def extent(self) -> list[tuple[float, float]]:
        """Least and largest entry of each prompt's output, as a pair of numbers per prompt."""
        return list(zip(*torch.stack(self.bounds).tolist(), strict=True))

    @property
    def attention(self) -> list[AttentionCall]:
        return self.recording.attention

    @property
    def units(self) -> list[UnitCall]:
        """Every FFN unit call, in call order."""
        return self.recording.units

    @functools.cached_property
    def second(self) -> MixerCall:
        """The call of the mixer that runs beside attention; to be asked for while the block's weights are in memory."""
        if self.recording.second is None:
            raise UnsupportedModelError("the mixer beside its attention does not run")
        return self.recording.second()

    def find_windows(self) -> None:
        """Rewrites attention over windows as attention over the block's own tokens, where these can be found."""
        if self.prompts > 1:
            self._tell_prompts_apart()
            return
        if len(self.attention) > 1:
            self._find_windows_apart()
        if len(self.attention) != 1 or self.parts.mixer is not None:
            return
        call, tokens = self.attention[0], self.input.shape[1]
        count = 1 if call.windows is None else call.windows.count
        if not isinstance(call.rows, StoredRows) or call.rows.matrix.shape[1] != call.rows.matrix.shape[2]:
            return
        if count == 1 and call.rows.tokens == tokens:
            return
        [values] = self.replay(asked_streams(self.input), stop_at_values=True).values
        every, together = values.shape[1], call.windows is None  # a model may fold windows and heads into one axis
        counts = [n for n in range(1, every + 1) if every % n == 0] if together else [count]
        found = (tokens_at(values.unflatten(1, (n, -1)), tokens) for n in counts)
        at = next((places for places in found if places is not None), None)
        if at is None:
            return
        rows = window_rows(call.rows.matrix.unflatten(0, (len(at), -1)), at)
        self.recording.attention[0] = in_windows(call, rows, rows.allowed())

    def _tell_prompts_apart(self) -> None:
        """As `find_windows`, for prompts as windows. Raises UnsupportedModelError for other kinds of attention."""
        calls, count, tokens = self.attention, self.prompts, self.input.shape[1] // self.prompts
        whole = [c for c in calls if isinstance(c.rows, StoredRows) and c.windows is not None and c.windows.at is None]
        if self.parts.mixer is not None or len(calls) != 1 or len(whole) != 1 or not self.parts.batched:
            raise UnsupportedModelError("its blocks take prompts one by one")
        [call] = whole
        assert isinstance(call.rows, StoredRows)
        if call.rows.matrix.shape[1:] != (tokens, tokens) or len(call.rows.matrix) % count:
            raise UnsupportedModelError("its attention reaches other vectors than the block's own tokens")
        mask = None if call.scored is None else call.scored.mask
        if mask is not None and not torch.equal(mask, mask[:1].expand_as(mask)):
            raise UnsupportedModelError("its mask tells prompts of as many tokens apart")
        at = torch.arange(count * tokens, device=self.input.device).reshape(count, tokens)
        rows = WindowRows(call.rows.matrix.unflatten(0, (count, -1)), Windows(count, at))
        self.recording.attention[0] = in_windows(call, rows, allowed_by(mask, tokens, tokens))

    def _find_windows_apart(self) -> None:
        """As `find_windows`, where one module attends within each window in a call of its own."""
        calls, tokens = self.attention, self.input.shape[1]
        sizes = tuple(call.rows.tokens for call in calls)
        whole = all(isinstance(c.rows, StoredRows) and len(c.value) == 1 and c.windows is None for c in calls)
        if len({call.module for call in calls}) > 1 or not whole or sum(sizes) != tokens:
            return
        matrices = [call.rows.matrix for call in calls if isinstance(call.rows, StoredRows)]
        answers = self.replay(asked_streams(self.input))
        if len(answers.values) != len(calls) or any(m.shape[-1] != m.shape[-2] for m in matrices):
            return
        at = tokens_at(laid(answers.values).transpose(0, 1), tokens)
        if at is None:
            return
        rows = window_rows(laid(matrices), at, sizes)
        value = rows.windows.inward(laid([call.value[0] for call in calls]))
        output = rows.windows.inward_mixed(laid([call.output[0] for call in calls]))
        self.recording.attention[:] = [
            replace(calls[0], rows=rows, value=value, output=output, windows=rows.windows, allowed=rows.allowed())
        ]

    def replay(
        self,
        items: Tensor,
        given: Sequence[Tensor] | None = None,
        *,
        attention: Tensor | None = None,
        stop_at_values: bool = False,
    ) -> Replay:
        """The block on `items` (items, N, M) with all dynamic parameters frozen.

        given: the output of each unit call, (items, *its own output's shape), in the order of `units`; None: zeros.
        attention: stands in for H V, (items, N, heads, d).
        """
        given = zero_given(self, len(items)) if given is None else given
        if self.parts.batched or items.shape[0] == 1:
            return self._replay_once(items, given, attention, stop_at_values)
        singles = [
            self._replay_once(
                items[k : k + 1],
                [g[k : k + 1] for g in given],
                None if attention is None else attention[k : k + 1],
                stop_at_values,
            )
            for k in range(items.shape[0])
        ]
        return stacked(singles)

    def silent(self, items: Tensor, given: Sequence[Tensor] | None = None) -> Replay:
        """As `replay`, with zeros in place of H V where the block has attention."""
        nothing = [call.output.new_zeros(len(items), *call.output.shape[1:]) for call in self.attention[:1]]
        return self.replay(items, given, attention=next(iter(nothing), None))

    def _replay_once(self, items: Tensor, given: Sequence[Tensor], attention: Tensor | None, stop: bool) -> Replay:
        attention = None if attention is None else attention.contiguous()  # as attention functions return it
        plan = Substitutes(self, items.shape[0], given, attention, stop, self.attention, self.prompts)
        apart = items if self.prompts == 1 else items.unflatten(1, (self.prompts, -1)).flatten(0, 1)
        args, kwargs = self.parts.hidden.put(*self.call, apart)
        if self.parts.cross is not None:  # a replay reads the encoder's states through cross-attention or not at all
            states = self.parts.cross.taken.get(args, kwargs)
            args, kwargs = self.parts.cross.taken.put(args, kwargs, states.new_zeros(()).expand_as(states))
        with self._rig.replaying(plan), contextlib.suppress(ReplayStop):
            output = self.parts.hidden.found(self._rig.call(self.parts.module, args, kwargs), apart)
            plan.result.output = output if self.prompts == 1 else output.reshape(items.shape)
        return plan.result

    def crossed(self, states: Tensor, *, attention: Tensor | None = None, stop_at_values: bool = False) -> Replay:
        """Cross-attention alone on other states of the encoder, (items, K, width), with its H held.

        attention: as in `replay`. The output is that of the module, (items, N, M).
        """
        assert self.parts.cross is not None
        assert self.recording.cross is not None
        slot, own, singles = self.parts.cross.states, self.recording.cross, []
        for item, one in enumerate(states.split(1)):
            mixed = None if attention is None else attention[item : item + 1]
            plan = Substitutes(self, 1, [], mixed, stop_at_values, [own.attention])
            with self._rig.replaying(plan), contextlib.suppress(ReplayStop):
                output = self._rig.call(self.parts.cross.module, *slot.put(own.args, own.kwargs, one))
                plan.result.output = parted(output)[0]
            singles.append(plan.result)
        return stacked(singles)


def in_windows(call: AttentionCall, rows: WindowRows, allowed: Tensor | None) -> AttentionCall:
    """The call as one over the block's own tokens, made of a call whose windows are additional heads in its rows."""
    count = rows.windows.count
    value = rows.windows.inward(call.value.unflatten(1, (count, -1))[0])
    output = rows.windows.inward_mixed(call.output.unflatten(2, (count, -1))[0].transpose(0, 1))
    return replace(call, rows=rows, value=value, output=output, windows=rows.windows, allowed=allowed)


def zero_given(run: BlockRun, items: int) -> list[Tensor]:
    """A zero output for every unit call, for that many items."""
    return [u.output.new_zeros(items, *u.output.shape) for u in run.units]

"""The trace of one short run of a model, block by block: which modules ran, in what order, on which tensors.

Discovery reads a block's parts off its trace. Every tensor is kept alive until the trace is dropped, so that equal
storage means the same tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import left, operations_left, writes_to
from duat_cli.models.arrays import random_like
from duat_cli.models.block.activations import put_activations
from duat_cli.models.block.slots import HiddenSlot, Key, parted, slots_of
from duat_cli.models.holding import holding
from duat_cli.models.instrument.attention import (
    AttentionCall,
    CapturePath,
    ForeignAttentionError,
    Interface,
    Watch,
    watched,
)
from duat_cli.models.instrument.calls import apart
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.interception import SoftmaxInterception


@dataclass(frozen=True, eq=False)
class Event:
    """One call of one module; compared by identity."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    versions: tuple[int, ...] = ()
    """Version of each of its tensors when the call ended; a write in place raises it."""
    source: Event | None = None  # the call in the model's layout, where this one is laid out by token
    slot: HiddenSlot | None = None  # that layout

    def by_token(self, slot: HiddenSlot, shape: torch.Size) -> Event:
        """This call with its tensors by token, (1, N, width), where its first one has the block's layout but for its
        width. slot: that of the block. shape: of the block's own hidden states."""
        first = next(iter(self.tensors), None)
        if first is None or first.shape[:-1] != shape[:-1]:
            return self
        args, kwargs, output = (_by_token(part, slot, len(shape)) for part in (self.args, self.kwargs, self.output))
        return replace(self, args=args, kwargs=kwargs, output=output, source=self, slot=slot)

    @property
    def slots(self) -> list[tuple[Key, Tensor]]:
        """The floating-point tensors among the arguments, each with its position or name."""
        return [(key, value) for key, value in slots_of(self.args, self.kwargs) if value.is_floating_point()]

    @property
    def tensors(self) -> list[Tensor]:
        """The floating-point tensors among the arguments."""
        return [value for _, value in self.slots]

    def unwritten(self) -> Event:
        """This call, or, where its first tensor was written to since, a call of the module on a random one."""
        if not self.versions or writes_to(self.tensors[0]) == self.versions[0]:
            return self
        value = random_like(self.tensors[0])
        with torch.no_grad():
            return Event(self.module, (value,), {}, self.again(value))

    @property
    def result(self) -> Tensor | None:
        """The output tensor: the output itself, or the first of a tuple."""
        if isinstance(self.output, Tensor):
            return self.output
        if isinstance(self.output, (tuple, list)) and self.output and isinstance(self.output[0], Tensor):
            return self.output[0]
        return None

    def again(self, value: Tensor, module: nn.Module | None = None) -> Tensor:
        """The output of the module, or the first of a tuple, when called again with `value` as its first tensor.
        module: one to call in its place."""
        return parted(self.all_again(value, module))[0]

    def all_again(self, value: Tensor, module: nn.Module | None = None) -> Any:
        """As `again`, with all that the module gives."""
        if self.source is not None and self.slot is not None:
            made = self.source.all_again(self.slot.apart(value), module)
            return _by_token(made, self.slot, self.source.tensors[0].ndim)
        x, called = self.tensors[0], self.module if module is None else module
        args = [value if a is x else a for a in self.args]
        return called(*args, **{k: value if v is x else v for k, v in self.kwargs.items()})


def _by_token(value: Any, slot: HiddenSlot, axes: int) -> Any:
    """A tensor of so many axes by token, also within a tuple, a list or a dictionary."""
    if isinstance(value, Tensor):
        return slot.together(value) if value.ndim == axes else value
    if isinstance(value, dict):
        return {key: _by_token(one, slot, axes) for key, one in value.items()}
    return type(value)(_by_token(one, slot, axes) for one in value) if type(value) in {tuple, list} else value


@dataclass
class Trace:
    """Module calls inside one call of a block, in the order in which they ended, with its own as the last; and the
    calls of attention."""

    events: list[Event] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    _by_module: dict[nn.Module, list[Event]] = field(default_factory=dict)
    ended_before: dict[int, int] = field(default_factory=dict)  # id of an attention call -> events before it

    def calls(self, module: nn.Module) -> list[Event]:
        """The calls of one module, in order."""
        if not self._by_module:
            for event in self.events:
                self._by_module.setdefault(event.module, []).append(event)
        return self._by_module.get(module, [])

    def by_token(self, slot: HiddenSlot, shape: torch.Size) -> None:
        """Lays out the tensors of all calls inside the block by token. slot, shape: as in `Event.by_token`."""
        self.events[:-1] = [event.by_token(slot, shape) for event in self.events[:-1]]

    def attention_of(self, modules: Collection[nn.Module]) -> list[AttentionCall]:
        """The attention calls of some modules, in order."""
        return [call for call in self.attention if call.module in modules]

    def called(self) -> set[nn.Module]:
        return {event.module for event in self.events}


def trace(model: Any, forward: Callable[[], Any], part: Any = None, *, block: Any = None) -> Trace:
    """The trace of `forward`, which is run and calls `model` once. part: as in `Tracer`. block: the module of the model
    whose one call is traced; None: the model."""
    written: list[Trace] = []

    def run(*, interface: bool) -> Trace:
        blocks = [model if block is None else block]
        tracer = Tracer(model, blocks, lambda _event, found: written.append(found), interface=interface, part=part)
        with tracer.attached(), tracer.active():
            forward()
        return written[-1]

    try:
        return run(interface=True)
    except ForeignAttentionError:  # the model keeps its own attention function, and its softmax is watched
        return run(interface=False)


class Tracer:
    """Traces a pass of a model block by block; the trace of a block is kept while `on_block` reads it.

    blocks: modules that may be blocks; none is inside another. on_block(call of the block, its trace): called after
    every call of such a module; what it runs is not traced.
    interface: whether attention is seen through transformers' interface, or only at its softmax. part: the part of the
    model whose attention is looked at; None: all of it. within: the module of that part; None: all of the part.
    outside: whether calls outside blocks are kept as well, all of them until the pass is over.
    operations: makes a mode of `operations_through` for the operations of the model, not for those of on_block.
    """

    def __init__(
        self,
        model: Any,
        blocks: Collection[nn.Module],
        on_block: Callable[[Event, Trace], None],
        *,
        interface: bool,
        part: Any = None,
        within: nn.Module | None = None,
        outside: bool = False,
        operations: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        put_activations(blocks)
        self._model, self._blocks, self._on_block, self._interface = model, set(blocks), on_block, interface
        self.ran: set[nn.Module] = set()  # every module that was called
        self._keeps_outside = outside
        self.outside: list[Event] = []  # calls of modules without children, outside of blocks
        self.attention: dict[nn.Module, CapturePath] = {}  # modules whose attention was seen, in order
        self.behind: dict[nn.Module, set[nn.Module]] = {}  # those that attend outside of blocks, and blocks behind each
        self._part = model if part is None else part
        self._switch = Interface(self._part)
        self._looked_at = set((self._part if within is None else within).modules())
        self._watch = Watch(self)
        self._stack: list[nn.Module] = []
        self._inside: Trace | None = None
        self._interception: SoftmaxInterception | None = None  # the mode of the pass, while it runs
        self._operations = operations
        self._mode: Any = None  # the one of `operations`, if any, while the pass runs
        self._on = False

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """The context around the whole pass, and around others that run while it is interrupted: a call that has begun
        uses the hooks that it began with."""
        return hooked(self._model.modules(), self._enter, self._leave)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context that a traced pass needs around it; left and entered again where the pass is interrupted."""
        with contextlib.ExitStack() as context:
            if self._interface:
                context.enter_context(self._switch.installed())
            context.enter_context(watched(self._model.modules(), self._watch))
            context.enter_context(torch.no_grad())
            self._interception = context.enter_context(SoftmaxInterception(self._watch, lambda: self._stack[-1]))
            context.enter_context(self._switched(on=True))
            mode = context.enter_context(self._operations())  # may hold weights, which are freed while it is left
            context.enter_context(holding(self, _mode=mode))
            yield

    @contextlib.contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        # softmax is left alone, as inside the interface
        with holding(self, _on=on), holding(self._watch, inside_interface=not on):
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._on:
            self._stack.append(module)
            if module in self._blocks:
                self._inside = Trace()
                for later in self.behind.values():
                    later.add(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._on:
            return
        self._stack.pop()
        self.ran.add(module)
        event = Event(module, *apart(args, kwargs), output)
        event = replace(event, versions=tuple(map(writes_to, event.tensors)))
        if self._inside is None:
            if self._keeps_outside and not any(module.children()):
                self.outside.append(event)
            return
        self._inside.events.append(event)
        if module in self._blocks:
            written, self._inside = self._inside, None
            with self._switched(on=False), left(self._interception), operations_left(self._mode):
                self._on_block(event, written)

    # -- probe protocol ------------------------------------------------------------------------------------

    def captured(self, call: AttentionCall) -> None:
        if call.module not in self._looked_at:
            return
        if self._inside is None:
            if call.module not in self.attention:
                self.behind.setdefault(call.module, set())
        else:
            self.behind.pop(call.module, None)
            self.attention.setdefault(call.module, call.path)
            self._inside.ended_before[id(call)] = len(self._inside.events)
            self._inside.attention.append(call)

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        return None

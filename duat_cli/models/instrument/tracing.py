"""One short run of a model, written down: which modules ran, in what order, on which tensors.

Discovery reads structure off this trace. Every tensor is kept alive until the trace is dropped, so that equal
storage means the same tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.instrument.attention import (
    AttentionCall,
    ForeignAttentionError,
    Watch,
    interface_installed,
    watched,
)
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.interception import SoftmaxInterception


@dataclass(frozen=True, eq=False)
class Event:
    """One call of one module; compared by identity."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def tensors(self) -> list[Tensor]:
        """The floating-point tensors among the arguments."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]

    @property
    def result(self) -> Tensor | None:
        """The output tensor: the output itself, or the first of a tuple."""
        if isinstance(self.output, Tensor):
            return self.output
        if isinstance(self.output, (tuple, list)) and self.output and isinstance(self.output[0], Tensor):
            return self.output[0]
        return None

    def again(self, value: Tensor) -> Tensor:
        """The module once more, with `value` in the place of its first tensor: its output, or the first of a tuple."""
        x = self.tensors[0]
        args = [value if a is x else a for a in self.args]
        output = self.module(*args, **{k: value if v is x else v for k, v in self.kwargs.items()})
        return output if isinstance(output, Tensor) else output[0]


@dataclass
class Trace:
    """Module calls in the order in which they ended, and the attention calls among them."""

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

    def events_after(self, call: AttentionCall) -> list[Event]:
        """The module calls that ended behind this attention call."""
        return self.events[self.ended_before[id(call)] :]

    def called(self) -> set[nn.Module]:
        return {event.module for event in self.events}


class _Listener:
    """Attention probe that only listens."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def captured(self, call: AttentionCall) -> None:
        self._trace.ended_before[id(call)] = len(self._trace.events)
        self._trace.attention.append(call)

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        return None


def trace(model: Any, forward: Callable[[], Any]) -> Trace:
    """Run `forward` once and write down every module call of `model` and every attention call."""
    try:
        return _traced(model, forward, interface_installed(model))
    except ForeignAttentionError:  # its own attention function stays, and its softmax is watched
        return _traced(model, forward, contextlib.nullcontext())


def _traced(model: Any, forward: Callable[[], Any], interface: contextlib.AbstractContextManager[Any]) -> Trace:
    written = Trace()
    stack: list[nn.Module] = []
    watch = Watch(_Listener(written))
    with contextlib.ExitStack() as context:
        context.enter_context(interface)
        context.enter_context(watched(model.modules(), watch))
        context.enter_context(torch.no_grad())
        context.enter_context(_events(model, written, stack))
        context.enter_context(SoftmaxInterception(watch, lambda: stack[-1]))
        forward()
    return written


def _events(model: nn.Module, written: Trace, stack: list[nn.Module]) -> contextlib.AbstractContextManager[None]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stack.pop()
        written.events.append(Event(module, args, kwargs, output))

    return hooked(model.modules(), enter, leave)

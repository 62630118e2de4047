"""Capture and replay: the model's own block, run once as usual and then again as an affine map.

While a `Rig` is active every block of the model is instrumented. The model runs as usual; after each block call the
rig hands over a `BlockRun`, which can replay that block on other vectors Z with all dynamic parameters held fixed:
attention returns H_frozen V(Z), norms keep their scale, and each unit returns the output that it is given. The block
is then z ↦ T z + c + U f, in the model's own code. Only one block's tensors are alive at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import uncheckpointed
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.block.linears import applied
from duat_cli.models.block.mixer import MixerForm
from duat_cli.models.block.norms import freeze, freeze_whole, with_zeros
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import joined, parted
from duat_cli.models.holding import holding
from duat_cli.models.instrument.activations import Extremes
from duat_cli.models.instrument.attention import AttentionCall, Interface, Watch, apply_rows, mixed_by, watched
from duat_cli.models.instrument.calls import first_tensor, on_another, only_tensor, without_cache
from duat_cli.models.instrument.hooks import Forward, Instead, patched, unexchanged
from duat_cli.models.instrument.interception import ClampFreezer, GateFreezer, SoftmaxInterception, WeightFreezer
from duat_cli.models.instrument.mixer import KernelRows, MixerCall
from duat_cli.models.instrument.records import (
    BlockRun,
    CrossCall,
    Recording,
    Substitutes,
    UnitCall,
    handed_values,
    zero_given,
)

__all__ = ["BlockRun", "Rig", "zero_given"]

OTHER_BLOCKS = "which of its blocks run, and in what order, depends on the input: its sum is not that of one chain"


class Rig:
    """Instruments on the given blocks of a model; the model is left as it was when they are no longer active."""

    def __init__(
        self,
        model: Any,
        blocks: Iterable[BlockParts],
        *,
        interface: bool,
        coming: Iterable[nn.Module] = (),
        whole: bool = False,
        prompts: int = 1,
        order: Sequence[nn.Module] = (),
    ) -> None:
        """coming: modules that may be learnt as blocks during a pass, at the latest just before they run. whole:
        whether norms are held with their rounding, as `freeze_whole` does. prompts: how many prompts of equal length
        run as one batch. order: the block calls of every pass, where they are known."""
        self._model, self.interface, self._whole, self._prompts = model, interface, whole, prompts
        self._attention = Interface(model)
        self.watch = Watch(self)
        self._by_module: dict[nn.Module, BlockParts] = {}
        self._by_attention: dict[nn.Module, BlockParts] = {}
        self._coming = list(coming)
        for parts in blocks:
            self.learn(parts)
        self._originals: dict[nn.Module, Callable[..., Any]] = {}
        self._patched = contextlib.ExitStack()  # while the rig is active
        self._instrumented: set[nn.Module] = set()  # blocks
        self.under_way: BlockParts | None = None
        self._recording: Recording | None = None
        self._block: BlockParts | None = None
        self._plan: Substitutes | None = None
        self._inner = False  # whether attention or a unit runs, in a block that weighs streams
        self._on_block: Callable[[BlockRun], None] | None = None
        self._calls, self._order = 0, order

    def learn(self, parts: BlockParts) -> None:
        """Adds a block to be instrumented from the next time that the rig is active."""
        self._by_module[parts.module] = parts
        self._by_attention.update(dict.fromkeys(parts.attending, parts))

    def mixer_of(self, attention: nn.Module) -> MixerForm | None:
        """The form of an attention module that is a mixer without softmax; None for any other."""
        return self._by_attention[attention].mixer

    @contextlib.contextmanager
    def active(self) -> Iterator[Rig]:
        with contextlib.ExitStack() as stack, holding(self, _patched=stack, _instrumented=set()):
            if self.interface:
                stack.enter_context(self._attention.installed())
            stack.enter_context(torch.no_grad())
            stack.enter_context(uncheckpointed())
            stack.callback(self._originals.clear)
            # also modules not known as blocks yet: a call uses the `forward` that the module has when the call begins
            self._patch((module, self._run_block) for module in (*self._coming, *self._by_module))
            if self.under_way is not None:
                self._instrument(self.under_way)
            yield self

    def _patch(self, patches: Iterable[tuple[nn.Module, Instead]]) -> None:
        for module, instead in patches:
            if module not in self._originals:
                self._originals[module] = self._patched.enter_context(patched(module, instead))

    def _instrument(self, parts: BlockParts) -> None:
        """Patches the modules inside a block, on its first call: a pass that is left at every block and taken up again
        patches only those that it runs."""
        if parts.module not in self._instrumented:
            self._instrumented.add(parts.module)
            self._patched.enter_context(watched(parts.attending, self.watch))
            self._patch(self._patches(parts))

    def run(self, forward: Callable[[], Any], on_block: Callable[[BlockRun], None]) -> Any:
        """Runs the model and returns its output; `on_block` is called with the `BlockRun` after each block call."""
        self._on_block, self._calls = on_block, 0
        try:
            with unexchanged(self._model):
                output = forward()
        finally:
            self._on_block = self._recording = None
        if self._calls < len(self._order):
            raise UnsupportedModelError(OTHER_BLOCKS)
        return output

    # -- probe protocol ------------------------------------------------------------------------------------

    def captured(self, call: AttentionCall) -> None:
        if self._recording is not None and self._block is not None:
            own = call.module in self._block.attention
            (self._recording.attention if own else self._recording.crossing).append(call.by_heads())

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        plan = self._plan
        if plan is None:
            return None
        if plan.run.parts.handed:
            value = plan.next_given()
        call = plan.calls_of[plan.attention_calls]
        if call.windows is not None and call.windows.sizes is not None:
            return plan.one_window(call.rows, call.windows, value)
        windows = call.windows
        if windows is not None and len(value) == 1:  # where the model has windows and heads on one axis
            value = value.unflatten(1, (windows.count, -1))[0]
        by_token = value if windows is None else windows.inward(value)
        mixed = plan.next_mixed(by_token, lambda: mixed_by(call.rows, value, windows))
        return mixed if windows is None else windows.outward(mixed)

    # -- instrumentation -----------------------------------------------------------------------------------

    def replaying(self, plan: Substitutes) -> contextlib.AbstractContextManager[None]:
        return holding(self, _plan=plan, _recording=None)

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The output of an instrumented module's own forward."""
        with self._watched(module):
            return self._originals[module](*args, **kwargs)

    def _patches(self, parts: BlockParts) -> Iterator[tuple[nn.Module, Instead]]:
        """Each instrumented module of a block, with the function that it runs in place of its own forward."""
        yield from ((module, self._norm_forward) for module in parts.norms)
        yield from ((module, self._unit_forward) for module in parts.units if module not in parts.attention)
        attention = self._attention_forward if parts.mixer is None else self._mixer_forward
        yield from ((module, attention) for module in parts.attention if module is not parts.module)
        if parts.cross is not None:
            yield parts.cross.module, self._unit_forward
        yield from ((module, self._linear_forward) for module in parts.first_linears.values())
        yield from ((module, self._outer_forward) for module in parts.outer_linears if parts.batched)

    def _run_block(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        parts = self._by_module.get(module)
        if parts is None:
            return original(*args, **kwargs)
        with holding(self, under_way=parts):
            self._instrument(parts)
            return self._block_forward(module, original, args, kwargs)

    def _block_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        parts = self._by_module[module]
        if self._on_block is None:
            return original(*args, **kwargs)
        self._recording, self._block = Recording(extremes=Extremes(self._prompts)), parts
        recording = self._recording
        with self._watched(module):
            output = original(*args, **kwargs)
        self._recording = None
        index, self._calls = self._calls, self._calls + 1
        if self._order and self._order[index : index + 1] != (module,):
            raise UnsupportedModelError(OTHER_BLOCKS)
        hidden = parts.hidden.found(output, parts.hidden.get(args, kwargs))
        run = BlockRun(self, index, parts, recording, without_cache(args, kwargs), hidden, self._prompts)
        run.find_windows()
        self._on_block(run)
        return output

    def _norm_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        x = only_tensor(module, args, kwargs)
        plan = self._plan
        if plan is not None:
            plan.passed(module, x)
            recorded, call = plan.run.recording, next(plan.calls[module])
            return joined(plan.held(recorded.norms[module][call], x), recorded.norm_rests[module][call])
        with holding(self, _inner=True):  # a replay runs no norm
            output = original(*args, **kwargs)
            if self._recording is not None and self._block is not None:
                y, rest = parted(output)
                frozen = (freeze_whole if self._whole else freeze)(self._block.norms[module], x, y)
                self._recording.norms[module].append(with_zeros(frozen, x, on_another(original, args, kwargs)))
                self._recording.norm_rests[module].append(rest)
                self._recording.extremes.see("norm", y)
        return output

    def _unit_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a unit or cross-attention. A replay holds the output of both; cross-attention reads only queries from
        the stream."""
        plan, recording, parts, x = self._plan, self._recording, self._block, first_tensor(args, kwargs)
        if plan is not None and x is not None:
            plan.passed(module, x)
            plan.result.unit_inputs.append(plan.by_item(x))
            rest = plan.run.units[plan.unit_calls].rest
            return joined(plan.next_given().clone(), rest)  # a copy: some blocks add the residual to it in place
        with self._watched(module):
            output = original(*args, **kwargs)
        if recording is None or parts is None or x is None:
            return output
        tensor, rest = parted(output)
        call = without_cache(args, kwargs)
        again = functools.partial(module, *call[0], **call[1])
        recording.units.append(UnitCall(module, x, tensor.clone(), rest, bool(recording.attention), again))  # see above
        if parts.second is not None and parts.second.form.module is module:
            recording.second = functools.partial(MixerCall.capture, parts.second.form, original, *call)
        if parts.cross is not None and parts.cross.module is module:
            if len(recording.crossing) == 1:
                states = parts.cross.states.get(args, kwargs)
                recording.cross = CrossCall(*call, states, recording.crossing[0])
            recording.extremes.see("attention", output)
        return output

    def _attention_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        plan, x = self._plan, first_tensor(args, kwargs)
        # attention by its projections alone has no queries and keys
        alone = self.watch.asked is None and self.watch.looked is None
        if plan is not None and plan.run.parts.direct and x is not None and alone:
            tensor = self._direct_attention(module, plan, x)
            return joined(tensor, plan.run.recording.attention_rests[module])
        if plan is not None and plan.run.parts.handed and x is not None:
            plan.result.unit_inputs.append(plan.by_item(x))
        with self._watched(module):
            output = original(*args, **kwargs)
        if self._recording is not None:
            if self._block is not None and self._block.handed and x is not None:
                self._recording.units.append(handed_values(self._recording.attention[-1], x))
            self._recording.attention_rests[module] = parted(output)[1]
            self._recording.extremes.see("attention", output)
        return output

    def _mixer_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a mixer without softmax. A replay applies the model's own kernel to other values."""
        plan, recording = self._plan, self._recording
        if plan is not None:
            with holding(self, _inner=True):
                return self._mixer_replay(plan.run.recording.mixers[module], plan, args, kwargs)
        if recording is None or self._block is None or self._block.mixer is None:
            return original(*args, **kwargs)
        with self.suspended():
            call = MixerCall.capture(self._block.mixer, original, args, kwargs)
        recording.mixers[module] = call
        if not call.form.affine:
            x = call.read
            recording.units.append(UnitCall(module, x, call.value, None, False, functools.partial(module, x)))
        recording.attention.append(call.attention())
        recording.extremes.see("attention", call.output)
        return call.output

    def _mixer_replay(self, call: MixerCall, plan: Substitutes, args: Any, kwargs: dict[str, Any]) -> Any:
        x = needed(first_tensor(args, kwargs))
        if call.form.affine:
            with self.suspended():
                value = call.values_at(x)
        else:
            plan.result.unit_inputs.append(plan.by_item(x))
            value = plan.next_given()
        rows = plan.calls_of[plan.attention_calls].rows
        values = call.by_head(value).transpose(1, 2)  # (items, heads, N, d)

        def mix() -> Tensor:
            if isinstance(rows, KernelRows):  # otherwise another H is held
                with self.suspended():
                    mixed = call.by_head(call.mix(value))
                if mixed.requires_grad or not (torch.is_grad_enabled() and value.requires_grad):
                    return mixed
                # its kernel stands inside a function with a gradient of its own, which records no graph
            return apply_rows(rows, values)

        return call.returning(plan.next_mixed(values, mix))

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """While active, the model's own code runs, neither recorded nor replayed."""
        return holding(self, _plan=None, _recording=None, _on_block=None)

    @contextlib.contextmanager
    def _watched(self, module: nn.Module) -> Iterator[None]:
        """Enters the torch function modes that this module needs: none unless it is attention, which few blocks are, or
        in a block that weighs several streams a token."""
        known, held = self._by_attention.get(module), self._plan is not None
        parts, recording = self._block, self._recording
        if self._plan is not None:
            parts, recording = self._plan.run.parts, self._plan.run.recording
        with contextlib.ExitStack() as stack:
            if parts is not None and recording is not None and parts.streams > 1:
                own = module is parts.module
                stack.enter_context(self._weighing(recording.weights, held=held) if own else holding(self, _inner=True))
            if known is None:
                yield
                return
            if parts is not None and recording is not None and parts.clamped:
                stack.enter_context(ClampFreezer(self.watch, recording.clamps[module], held=held))
            if parts is not None and recording is not None and parts.gated:
                stack.enter_context(GateFreezer(recording.gates[module], held=held, apart=self._inside_interface))
            if module in known.intercepted:
                stack.enter_context(SoftmaxInterception(self.watch, lambda: module))
            yield

    def _inside_interface(self) -> bool:
        return self.watch.inside_interface

    def _weighing(self, weights: list[Tensor], *, held: bool) -> WeightFreezer:
        """The mode that holds the weights of streams, in what belongs to no attention and no unit of the block."""

        def apart() -> bool:
            return self._inner or (self._plan is None and self._recording is None)

        return WeightFreezer(weights, held=held, apart=apart)

    def _direct_attention(self, module: nn.Module, plan: Substitutes, x: Tensor) -> Tensor:
        """O(H V(x)) by the layers that V and O are read from; H V(x) where O stands outside the module."""
        parts = plan.run.parts
        assert parts.value_projection is not None
        assert parts.output_projection is not None
        linear = functools.partial(applied, parts.value_projection.linear)
        value = linear(x) if parts.arrives else plan.once_each(linear, x)  # all items differ where units arrive
        columns = needed(parts.value_projection.columns)
        if not torch.equal(columns.flatten(), torch.arange(value.shape[-1])):
            value = value[..., columns.flatten().to(value.device)]
        value = value.unflatten(-1, tuple(columns.shape)).transpose(1, 2)  # (items, kv_heads, N, d)
        mixed = needed(self.replacement(module, value))
        last = parts.output_projection.linear
        return last(mixed.flatten(2)) if last in set(module.modules()) else mixed.flatten(2)

    def _outer_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a linear layer; in a replay once for equal items, because those of the static bias often repeat."""
        return original(*args, **kwargs) if self._plan is None else self._plan.once_each(original, *args, **kwargs)

    def _linear_forward(self, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._recording is not None:
            self._recording.linears[module] = output
        return output

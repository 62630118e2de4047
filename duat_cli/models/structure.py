"""Discovery: blocks, attention, norms and FFN units of any model, found by what they do and proved by replay.

Nothing here knows an architecture. Blocks are the calls of the ModuleList that holds the attention modules; norms
are modules that behave as one (norms.py); an FFN unit is a nonlinear module of a block, outside attention, that
reads the hidden states. What is found is proved on a short random input: the replayed block must be affine, and
the residual stream must pass through it. What stays unproved is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, resolution, same_storage
from duat_cli.models.attention import CapturePath
from duat_cli.models.norms import NormForm, recognise
from duat_cli.models.rig import BlockParts, BlockRun, HiddenSlot, Rig, hidden_of
from duat_cli.models.tracing import Event, Trace, trace

DISCOVERY_TOKENS = 11  # short, odd, and unlike a count of heads or experts
SEED = 20240511


@dataclass(frozen=True)
class ModelStructure:
    """What discovery found and proved."""

    stack: Any  # the module to run: the base model without its head, or the encoder of an encoder-decoder
    blocks: tuple[BlockParts, ...]  # one a distinct block module
    calls: tuple[nn.Module, ...]  # block modules in call order; a shared module stands here more than once
    path: CapturePath
    hidden_size: int
    uncovered: tuple[str, ...]  # parts of the model that the DUAT form leaves out

    def parts(self, call: int) -> BlockParts:
        """The parts of the block of that call."""
        return next(b for b in self.blocks if b.module is self.calls[call])


def run_stack(stack: Any, input_ids: Tensor) -> Any:
    """One plain forward pass: unbatched, without a cache."""
    return stack(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **_cache_off(stack))


def _cache_off(stack: Any) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(stack.config, "use_cache") else {}


def discover(model: Any) -> ModelStructure:
    """Find and prove the structure of `model`; UnsupportedModelError names what could not be proved."""
    stack, uncovered = _stack_of(model)
    ids = _probe_ids(stack)
    written = trace(stack, lambda: run_stack(stack, ids))
    callers = {call.module for call in written.attention}
    if not callers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: no softmax attention runs in its forward pass; duat needs a transformer"
        )
    calls = _block_calls(stack, written, callers)
    _assert_chained(calls)
    modules = list(dict.fromkeys(event.module for event in calls))
    names = {module: name for name, module in stack.named_modules()}
    first_call = {event.module: event for event in reversed(calls)}
    blocks = tuple(
        _proved(stack, _parts(first_call[module], names[module], written, callers), written, ids)
        for module in modules
    )
    paths = {call.path for call in written.attention}
    path: CapturePath = "softmax interception" if "softmax interception" in paths else "attention interface"
    width = blocks[0].hidden.get(calls[0].args, calls[0].kwargs).shape[-1]
    return ModelStructure(stack, blocks, tuple(e.module for e in calls), path, width, uncovered)


def _stack_of(model: Any) -> tuple[Any, tuple[str, ...]]:
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        return encoder, ("decoder stack (cross-attention); only the encoder is analysed",)
    return model.base_model, ()


def _probe_ids(stack: Any) -> Tensor:
    """Random token ids that are no special ones."""
    rows = stack.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    low = min(10, rows - 1)
    ids = torch.randint(low, rows, (1, DISCOVERY_TOKENS), generator=generator)
    return ids.to(stack.device)


# -- blocks ------------------------------------------------------------------------------------------------


def _block_calls(stack: nn.Module, written: Trace, callers: set[nn.Module]) -> list[Event]:
    """The calls of the elements of the outermost ModuleList around the attention modules, in call order."""
    lists = {name: module for name, module in stack.named_modules() if isinstance(module, nn.ModuleList)}
    names = {module: name for name, module in stack.named_modules()}
    homes = {_home(names[c], lists) for c in callers if c in names}
    if None in homes or not homes:
        raise UnsupportedModelError("attention runs outside any list of blocks")
    if len(homes) > 1:
        raise UnsupportedModelError(f"attention runs in several stacks: {', '.join(sorted(map(str, homes)))}")
    elements = set(lists[str(homes.pop())])
    calls = [event for event in written.events if event.module in elements]
    for position, event in enumerate(calls):
        if not any(c in callers for c in event.module.modules()):
            kinds = ", ".join(sorted({type(c).__name__ for c in event.module.children()}))
            raise UnsupportedModelError(f"block {position} has no softmax attention (its parts: {kinds})")
    return calls


def _home(name: str, lists: dict[str, nn.ModuleList]) -> str | None:
    inside = [list_name for list_name in lists if name.startswith(list_name + ".")]
    return min(inside, key=len) if inside else None


def _hidden_slot(event: Event) -> HiddenSlot:
    """The block's first floating-point argument of rank three is its hidden states."""
    slots: list[tuple[int | str, Any]] = [*enumerate(event.args), *event.kwargs.items()]
    for key, value in slots:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return HiddenSlot(key)
    raise UnsupportedModelError(f"{type(event.module).__name__} takes no hidden states of shape (batch, N, M)")


def _assert_chained(calls: Sequence[Event]) -> None:
    for position, (before, after) in enumerate(zip(calls, calls[1:], strict=False)):
        taken = _hidden_slot(after).get(after.args, after.kwargs)
        given = hidden_of(before.output, taken)
        if not torch.equal(taken, given):
            raise UnsupportedModelError(
                f"the input of block {position + 1} is not the output of block {position}: "
                "the model changes the residual stream between its blocks"
            )


# -- parts -------------------------------------------------------------------------------------------------


def _parts(event: Event, name: str, written: Trace, callers: set[nn.Module]) -> BlockParts:
    block = event.module
    inside = set(block.modules())
    attention = tuple(dict.fromkeys(c.module for c in written.attention if c.module in inside))
    intercepted = {c.module for c in written.attention if c.path == "softmax interception"}
    norms = _norms(block, written)
    units = tuple(_units(block, written, set(attention), norms))
    parts = BlockParts(
        name=name,
        module=block,
        hidden=_hidden_slot(event),
        attention=attention,
        intercepted=frozenset(intercepted & inside),
        norms=norms,
        units=units,
    )
    return _with_linears(parts, written)


def _norms(block: nn.Module, written: Trace) -> dict[nn.Module, NormForm]:
    found: dict[nn.Module, NormForm] = {}
    for module in block.modules():
        calls = written.calls(module)
        if not calls or len(calls[0].tensors) != 1 or calls[0].result is None or any(module.children()):
            continue
        form = recognise(module, calls[0].tensors[0], calls[0].result)
        if form is not None:
            found[module] = form
    return found


def _units(
    module: nn.Module, written: Trace, attention: set[nn.Module], norms: dict[nn.Module, NormForm]
) -> Iterator[nn.Module]:
    """The largest nonlinear modules below `module` that hold no attention and read one stream."""
    called = written.called()
    for child in module.children():
        if child in attention or child in norms:
            continue
        if child not in called or any(m in attention for m in child.modules()):
            yield from _units(child, written, attention, norms)
            continue
        event = written.calls(child)[0]
        if _is_affine(event):
            continue
        if _reads_one_stream(event):
            yield child
        else:
            yield from _units(child, written, attention, norms)


def _reads_one_stream(event: Event) -> bool:
    streams = [t for t in event.tensors if t.ndim >= 2]
    return len(streams) == 1 and event.result is not None


def _is_affine(event: Event) -> bool:
    """Whether f(x + r) = f(x) + f(r) - f(0) at the captured input and a random vector of its size."""
    if not event.tensors or event.result is None:
        return True  # reads no hidden states: constant to the stream
    x = event.tensors[0]
    if isinstance(event.module, nn.Linear):
        return True

    def f(value: Tensor) -> Tensor:
        args = [value if a is x else a for a in event.args]
        kwargs = {k: value if v is x else v for k, v in event.kwargs.items()}
        output = event.module(*args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    with torch.no_grad():
        r = _random_like(x)
        try:
            return relative_error(f(x) + f(r) - f(torch.zeros_like(x)), f(x + r)) <= 100 * resolution(x.dtype)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False


def _random_like(x: Tensor, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + salt)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    return noise * x.square().mean().sqrt().clamp_min(1e-3)


def _with_linears(parts: BlockParts, written: Trace) -> BlockParts:
    """Find each unit's first linear layer and its output bias."""
    biases: dict[nn.Module, Tensor] = {}
    firsts: dict[nn.Module, nn.Module] = {}
    for unit in parts.units:
        event = written.calls(unit)[0]
        leaves = [e for m in unit.modules() for e in written.calls(m) if not any(m.children())]
        leaves = [e for e in written.events if e in leaves]
        last = next((e for e in reversed(leaves) if _makes(e, event)), None)
        bias = getattr(last.module, "bias", None) if last is not None else None
        if isinstance(bias, Tensor):
            biases[unit] = bias.detach()
        first = _first_linear(leaves, event)
        if first is not None:
            firsts[unit] = first
    return replace(parts, unit_biases=biases, first_linears=firsts)


def _makes(leaf: Event, unit: Event) -> bool:
    """Whether the unit returns the very output of this affine leaf."""
    if leaf.module is unit.module or leaf.result is None or unit.result is None or not _is_affine(leaf):
        return False
    same = leaf.result.numel() == unit.result.numel() and same_storage(leaf.result, unit.result)
    return same and hasattr(leaf.module, "weight")


def _first_linear(leaves: list[Event], unit: Event) -> nn.Module | None:
    """The linear layer that reads the unit's input and whose output the nonlinearity reads."""
    x = unit.tensors[0]
    readers = [
        e for e in leaves
        if e.module is not unit.module and e.tensors and same_storage(e.tensors[0], x)
        and e.result is not None and hasattr(e.module, "weight") and _is_affine(e)
    ]
    for reader in readers:
        for e in leaves:
            if e.tensors and same_storage(e.tensors[0], reader.result) and not _is_affine(e):  # type: ignore[arg-type]
                return reader.module
    return readers[0].module if len(readers) == 1 else None


# -- proof -------------------------------------------------------------------------------------------------


def _proved(stack: Any, parts: BlockParts, written: Trace, ids: Tensor) -> BlockParts:
    """Units whose replay lets no residual through are opened; the rest must be affine."""
    for _ in range(8):
        parts = replace(parts, batched=False)
        fault, culprits = _fault(stack, parts, ids)
        if fault is None:
            return _refined(stack, parts, written, ids)
        units = [u for u in parts.units if u not in culprits]
        opened = [v for u in culprits for v in _units(u, written, set(parts.attention), parts.norms)]
        if not culprits or not opened:
            raise UnsupportedModelError(f"{parts.name}: {fault}")
        order = [e.module for e in written.events]
        units = sorted([*units, *opened], key=order.index)
        parts = _with_linears(replace(parts, units=tuple(units)), written)
    raise UnsupportedModelError(f"{parts.name}: its FFN could not be told from its residual stream")


def _on_block(stack: Any, parts: BlockParts, ids: Tensor, question: Callable[[BlockRun], Any]) -> Any:
    """Ask `question` of the first run of this block on the probe input."""
    answers: list[Any] = []

    def ask(run: BlockRun) -> None:
        if not answers:
            answers.append(question(run))

    with Rig(stack, [parts], interface=not parts.intercepted).active() as rig:
        rig.run(lambda: run_stack(stack, ids), ask)
    return answers[0]


def _fault(stack: Any, parts: BlockParts, ids: Tensor) -> tuple[str | None, list[nn.Module]]:
    """What is wrong with the replayed block (None: nothing), and which units may be to blame."""

    def question(run: BlockRun) -> tuple[str | None, list[nn.Module]]:
        if not run.attention:
            return "its attention did not run through the captured path", []
        nothing = zero_given(run, 1)
        x, r = run.input, _random_like(run.input)
        silent = torch.zeros_like(run.attention[0].output)
        base = _output(run, torch.zeros_like(x), nothing, silent)
        through = _output(run, r, nothing, silent) - base
        if float(through.abs().max()) <= 1e-6 * float(r.abs().max()):
            return "the residual stream does not pass through the replayed block", list(parts.units)
        at_0, at_x, at_r, at_sum = (
            _output(run, z, nothing) for z in (torch.zeros_like(x), x, r, x + r)
        )
        error = relative_error(at_x + at_r - at_0, at_sum)
        if error > 1000 * resolution(x.dtype):
            return f"with its dynamic parameters frozen it is not affine (relative error {error:.1e})", []
        real = _output(run, x, [u.output[None] for u in run.units])
        error = relative_error(real, run.output)
        if error > 1000 * resolution(x.dtype):
            return f"its replay does not give its own output (relative error {error:.1e})", []
        return None, []

    return _on_block(stack, parts, ids, question)


def zero_given(run: BlockRun, items: int) -> list[Tensor]:
    """A zero output for every unit call, for that many items."""
    return [u.output.new_zeros(items, *u.output.shape) for u in run.units]


def _output(run: BlockRun, z: Tensor, given: list[Tensor], attention: Tensor | None = None) -> Tensor:
    output = run.replay(z, given, attention=attention).output
    assert output is not None
    return output


def _refined(stack: Any, parts: BlockParts, written: Trace, ids: Tensor) -> BlockParts:
    """What makes replay cheaper, each kept only if the outputs stay the same: batching, idle projections."""
    batched = replace(parts, batched=not parts.intercepted)
    if batched.batched and not _on_block(stack, batched, ids, _batches):
        batched = replace(parts, batched=False)
    idle = _idle_candidates(batched, written)
    if idle:
        skipping = replace(batched, idle=idle)
        if _on_block(stack, batched, ids, _fingerprint).equal(_on_block(stack, skipping, ids, _fingerprint)):
            return skipping
    return batched


def _batches(run: BlockRun) -> bool:
    items = torch.cat([run.input, _random_like(run.input)])
    single = replace(run.parts, batched=False)
    given = zero_given(run, 2)
    try:
        together = run.replay(items, given).output
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    run.parts = single
    apart = run.replay(items, given).output
    assert together is not None
    assert apart is not None
    return relative_error(together, apart) <= 100 * resolution(items.dtype)


def _fingerprint(run: BlockRun) -> Tensor:
    return _output(run, _random_like(run.input), zero_given(run, 1))


def _idle_candidates(parts: BlockParts, written: Trace) -> dict[nn.Module, int]:
    """Linear layers inside attention whose output is neither the values nor made of H V: queries and keys."""
    calls = [c for c in written.attention if c.module in parts.attention]
    idle: dict[nn.Module, int] = {}
    for attention in parts.attention:
        for module in attention.modules():
            events = written.calls(module)
            if not events or any(module.children()) or not hasattr(module, "weight") or module in parts.norms:
                continue
            result = events[0].result
            if result is None or result.ndim != 3 or not _is_affine(events[0]):
                continue
            used = any(same_storage(result, c.value) or same_storage(events[0].tensors[0], c.output) for c in calls)
            if not used:
                idle[module] = result.shape[-1]
    return idle

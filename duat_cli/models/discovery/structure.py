"""Discovery: blocks, attention, norms and FFN units of any model, found by what they do and proved by replay.

Nothing here knows an architecture. Blocks are the calls of the ModuleList that holds the attention modules; norms
are modules that behave as one (norms.py); an FFN unit is a nonlinear module of a block, outside attention, that
reads the hidden states. What is found is proved on a short random input: the replayed block must be affine, and
the residual stream must pass through it. What stays unproved is refused with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, rounding, same_storage, wide
from duat_cli.models.block.norms import NormForm, recognise, scale_invariant
from duat_cli.models.block.parts import BlockParts, HiddenSlot
from duat_cli.models.discovery.modality import require_token_ids, stack_of
from duat_cli.models.discovery.proof import ProvedBlock, Verdict, examine
from duat_cli.models.discovery.unread import unread_attention
from duat_cli.models.instrument.attention import CapturePath
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.instrument.foreign import model_code
from duat_cli.models.instrument.plain import deviation, instrumented_outputs, plain_outputs
from duat_cli.models.instrument.rig import Rig
from duat_cli.models.instrument.tracing import Event, Trace, trace
from duat_cli.models.value_path.projections import output_projection, value_projection

DISCOVERY_TOKENS = 11  # short, odd, and unlike a count of heads or experts
SEED = 20240511
MAX_OPENINGS = 8


@dataclass(frozen=True)
class ModelStructure:
    """What discovery found and proved."""

    stack: Any  # the module to run: the base model without its head, or the encoder of an encoder-decoder
    blocks: tuple[ProvedBlock, ...]  # one a distinct block module
    calls: tuple[nn.Module, ...]  # block modules in call order; a shared module stands here more than once
    path: CapturePath
    hidden_size: int
    uncovered: tuple[str, ...]  # parts of the model that the DUAT form leaves out
    plain_error: float  # of a pass of the probe prompt under instruments, relative to one without

    def block(self, call: int) -> ProvedBlock:
        """The block of that call."""
        return next(b for b in self.blocks if b.parts.module is self.calls[call])

    def rig(self, row_budget: int | None = None) -> Rig:
        """The instruments for a run of `stack`."""
        interface = self.path == "attention interface"
        return Rig(self.stack, [b.parts for b in self.blocks], interface=interface, row_budget=row_budget)


def run_stack(stack: Any, input_ids: Tensor) -> Any:
    """One plain forward pass: unbatched, without a cache."""
    return stack(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **_cache_off(stack))


def _cache_off(stack: Any) -> dict[str, Any]:
    """A cache would grow with every replay."""
    return {"use_cache": False} if "use_cache" in inspect.signature(stack.forward).parameters else {}


def discover(model: Any) -> ModelStructure:
    """Find and prove the structure of `model`; UnsupportedModelError names what could not be proved."""
    with model_code(type(model).__name__):
        return _discover(model)


def _discover(model: Any) -> ModelStructure:
    stack, uncovered = _stack_of(model)
    ids = probe_ids(stack, DISCOVERY_TOKENS)
    written = trace(stack, lambda: run_stack(stack, ids))
    callers = {call.module for call in written.attention}
    if not callers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: no softmax attention that duat can follow runs in its forward pass"
        )
    calls = _block_calls(stack, written, callers)
    if not calls:
        raise UnsupportedModelError(f"{type(model).__name__} never calls the blocks that hold its attention")
    _assert_chained(calls)
    modules = list(dict.fromkeys(event.module for event in calls))
    names = {module: name for name, module in stack.named_modules()}
    first_call = {event.module: event for event in reversed(calls)}
    parts = [_parts(first_call[module], names[module], written, callers) for module in modules]
    blocks = tuple(_proved(stack, parts, written, ids))
    paths = {call.path for call in written.attention}
    path: CapturePath = "softmax interception" if "softmax interception" in paths else "attention interface"
    width = parts[0].hidden.get(calls[0].args, calls[0].kwargs).shape[-1]
    unread = unread_attention(model, written.called() | callers)
    uncovered = (*uncovered, *_mixing_notes([b.parts for b in blocks]), *_proof_notes(blocks), *unread)
    structure = ModelStructure(stack, blocks, tuple(e.module for e in calls), path, width, uncovered, 0.0)
    return replace(structure, plain_error=_instruments_error(structure, ids))


def _instruments_error(structure: ModelStructure, ids: Tensor) -> float:
    """How far a pass under instruments is from the model as transformers runs it."""

    def forward() -> Any:
        return run_stack(structure.stack, ids)

    with structure.rig().active() as rig:
        seen = instrumented_outputs(rig, forward, lambda _run: None)
    return deviation(seen, plain_outputs(structure.calls[-1], forward))


def _stack_of(model: Any) -> tuple[Any, tuple[str, ...]]:
    require_token_ids(model)
    if getattr(model.config, "is_encoder_decoder", False):
        if not hasattr(stack_of(model), "config"):
            name = type(stack_of(model)).__name__
            raise UnsupportedModelError(f"{name} has no config of its own, so its attention stays unseen")
        return stack_of(model), ("decoder stack (cross-attention); only the encoder is analysed",)
    return stack_of(model), ()


def probe_ids(stack: Any, tokens: int) -> Tensor:
    """Random token ids that are no special ones."""
    rows = stack.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(SEED)
    low = min(10, rows - 1)
    ids = torch.randint(low, rows, (1, tokens), generator=generator)
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
    return [event for event in written.events if event.module in elements]


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
    for position, (before, after) in enumerate(pairwise(calls)):
        taken = _hidden_slot(after).get(after.args, after.kwargs)
        if not bool(torch.isfinite(taken).all()):
            raise UnsupportedModelError(f"block {position} puts out values that are not finite")
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
    if len(attention) == 1:
        call = next(c for c in written.attention if c.module is attention[0])
        parts = replace(
            parts,
            value_projection=value_projection(event, parts, written, call),
            output_projection=output_projection(parts, written, call),
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
        if _reads_one_stream(event) and not _holds_stream(event):
            if not any(child.children()) and scale_invariant(child, event.tensors[0]):
                raise UnsupportedModelError(
                    f"{type(child).__name__} ignores the scale of its input as a norm does, but cannot be frozen as one"
                )
            yield child
        else:
            yield from _units(child, written, attention, norms)


def _holds_stream(event: Event) -> bool:
    """Whether the unit adds its own input to its output: far out, what follows a norm inside it is outgrown."""
    if not any(event.module.children()) or event.result is None or event.result.shape != event.tensors[0].shape:
        return False
    far = 1e4 * random_like(event.tensors[0])
    with torch.no_grad():
        odd = wide(event.again(far)) - wide(event.again(-far))
    factor = (odd * wide(far)).sum() / wide(far).square().sum()
    return bool(factor.abs() > 1e-3) and relative_error(odd, factor * wide(far)) <= 1e-2


def _mixing_notes(blocks: Sequence[BlockParts]) -> list[str]:
    """FFN units act on each token alone; what else is nonlinear and mixes tokens is no FFN, and is said so."""
    kinds = sorted({type(unit).__name__ for b in blocks for unit in b.mixing})
    return [f"{kind} mixes tokens without softmax attention; its output counts among the UAT terms" for kind in kinds]


def _proof_notes(blocks: Sequence[ProvedBlock]) -> list[str]:
    return sorted({note for block in blocks for note in block.notes})


def _mixes_tokens(event: Event) -> bool:
    """Whether a change of one token's input, the first's or the last's, moves another token's output."""
    x = event.tensors[0]
    if x.ndim < 2 or x.shape[-2] != DISCOVERY_TOKENS or event.result is None:
        return False

    def output(value: Tensor) -> Tensor:
        return event.again(value).reshape(DISCOVERY_TOKENS, -1)

    with torch.no_grad():
        base = output(x)
        for token, others in ((0, slice(1, None)), (DISCOVERY_TOKENS - 1, slice(0, -1))):
            changed = x.clone()
            changed[..., token, :] += random_like(x)[..., token, :]
            moved = (output(changed) - base)[others].abs().max()
            if float(moved) > 1e-4 * float(base.abs().max()):
                return True
    return False


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
    with torch.no_grad():
        r = random_like(x)
        try:
            apart = event.again(x) + event.again(r) - event.again(torch.zeros_like(x))
            return relative_error(apart, event.again(x + r)) <= rounding(x.dtype)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False


def _with_linears(parts: BlockParts, written: Trace) -> BlockParts:
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
    mixing = frozenset(unit for unit in parts.units if _mixes_tokens(written.calls(unit)[0]))
    return replace(parts, unit_biases=biases, first_linears=firsts, mixing=mixing)


def _output_bias(leaves: list[Event], unit: Event) -> Tensor | None:
    """What the last biased layer's bias adds to the unit's output, (width,), measured without it.

    None where it adds nothing, or not the same to every token (the bias of an expert is part of that expert's term).
    """
    for leaf in reversed(leaves):
        bias = getattr(leaf.module, "bias", None)
        if leaf.module is unit.module or not isinstance(bias, Tensor) or not _is_affine(leaf):
            continue
        with torch.no_grad():
            kept, whole = bias.clone(), unit.again(unit.tensors[0]).clone()
            try:
                bias.zero_()
                added = whole - unit.again(unit.tensors[0])
            finally:
                bias.copy_(kept)
        rows = added.reshape(-1, added.shape[-1])
        same = relative_error(rows, rows[:1].expand_as(rows)) <= rounding(rows.dtype)
        exact = rows.shape[-1] == kept.numel() and relative_error(rows[0], kept) <= rounding(rows.dtype)
        return (kept if exact else rows[0]) if same and bool(rows.any()) else None
    return None


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
    # An activation that is a plain function leaves no event; two layers then can only be W2 and W3.
    return readers[0].module if len(readers) == 1 and len(linear) == 2 else None


# -- proof -------------------------------------------------------------------------------------------------


def _proved(stack: Any, blocks: list[BlockParts], written: Trace, ids: Tensor) -> list[ProvedBlock]:
    """Prove every block in one run; units that swallow the residual stream are opened and the run repeated."""
    for _ in range(MAX_OPENINGS):
        verdicts = examine(stack, blocks, lambda: run_stack(stack, ids))
        if all(v.fault is None for v in verdicts):
            return [v.proved() for v in verdicts]
        blocks = [v.parts if v.fault is None else _opened(v, written) for v in verdicts]
    raise UnsupportedModelError(f"{blocks[0].name}: its FFN could not be told from its residual stream")


def _opened(verdict: Verdict, written: Trace) -> BlockParts:
    """The block with the suspected units replaced by the nonlinear modules inside them."""
    parts = verdict.parts
    opened = [v for u in verdict.culprits for v in _units(u, written, set(parts.attention), parts.norms)]
    if not opened:
        raise UnsupportedModelError(f"{parts.name}: {verdict.fault}")
    kept = [u for u in parts.units if u not in verdict.culprits]
    return _with_linears(replace(parts, units=(*kept, *opened)), written)

"""Proof of a block's parts on a short random input.

Three things must hold for the replayed block: the residual stream passes through it, it is affine, and at the captured
input it gives the block's own output. Then two savings are tried, each kept only if outputs stay the same (several
items in one replay; attention without queries and keys), and the factors of W' are found.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import DuatError, UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, rounding, tolerance_for
from duat_cli.models.block.linears import without_bias
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.beside import reads, take_handed
from duat_cli.models.discovery.blame import AFFINE, IN_UNITS, OUT_OF_RANGE, blamed
from duat_cli.models.discovery.cross import cross_fault, gives_nothing_for_zero
from duat_cli.models.discovery.parts import nonlinear_units, with_linears
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import without_cache
from duat_cli.models.instrument.hooks import giving
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun, Rig, zero_given
from duat_cli.models.instrument.tracing import Trace, trace
from duat_cli.models.value_path.factors import Base, BlockFactors, find_factors
from duat_cli.models.value_path.projections import projects_to_zero
from duat_cli.models.value_path.second import find_second_factors

UNLIKE = RuntimeError, ValueError, TypeError, LookupError
"""Errors of a replay that several items cannot share, or that cannot run on projections alone."""


@dataclass(frozen=True)
class ProvedBlock:
    """A block whose replay is proved to be affine and to give the block's own output."""

    parts: BlockParts
    factors: BlockFactors | None = None
    factors_reason: str | None = None  # why W' has no Kronecker factors
    notes: tuple[str, ...] = ()  # what the block does beside attention and FFN
    cross: BlockFactors | None = None  # factors of cross-attention, or of a mixer beside attention
    cross_reason: str | None = None  # why W'_c has no Kronecker factors, where there is either

    def without_values(self) -> ProvedBlock:
        """This block with its factors reduced to their shapes."""
        return replace(self, factors=_shapes_of(self.factors), cross=_shapes_of(self.cross))


def _shapes_of(factors: BlockFactors | None) -> BlockFactors | None:
    return None if factors is None else replace(factors, heads=factors.heads.without_values())


@dataclass(frozen=True)
class _Unproved:
    """A block with a fault that another choice of units may mend."""

    parts: BlockParts
    fault: str
    culprits: tuple[nn.Module, ...]  # units that may hold the residual stream


class Proof:
    """One pass of the probe prompt that proves every block.

    Raises UnsupportedModelError for a fault that no other choice of units can mend. on_proved: called after each block,
    which may be called again then. factors: as in `discover`. interface, coming: as in `Rig`.
    """

    def __init__(
        self,
        stack: Any,
        forward: Callable[[], Any],
        on_proved: Callable[[ProvedBlock, BlockRun], None],
        factors: bool,
        *,
        interface: bool,
        coming: Iterable[nn.Module],
    ) -> None:
        self._forward, self._on_proved, self._factors = forward, on_proved, factors
        self._stack, self._new_rig = stack, partial(Rig, stack, interface=interface)
        self._rig = self._new_rig([], coming=coming)
        self._asked: set[nn.Module] = set()

    def learn(self, parts: BlockParts) -> None:
        """Takes the parts of a block; to be called before that block runs."""
        self._rig.learn(_on_record(parts))

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return self._rig.active()

    def run(self) -> None:
        """Runs the pass."""
        self._rig.run(self._forward, self._ask)

    def _ask(self, run: BlockRun) -> None:
        if run.parts.module in self._asked:
            return
        self._asked.add(run.parts.module)
        verdict = _verdict(run, self._factors)
        with self._rig.suspended():  # calls of the block from here on are none of the pass
            while isinstance(verdict, _Unproved):
                verdict = self._with_other_units(verdict, run)
            self._on_proved(verdict, run)

    def _with_other_units(self, unproved: _Unproved, run: BlockRun) -> ProvedBlock | _Unproved:
        """The verdict on the block, called once more, with the suspected units replaced by the units inside them."""
        found: list[ProvedBlock | _Unproved] = []
        rig = self._new_rig([_on_record(_opened(unproved, traced_again(run, self._stack)))])
        with rig.active():
            rig.run(partial(_again, run), lambda again: found.append(_verdict(again, self._factors)))
        return found[0]


def traced_again(run: BlockRun, part: Any) -> Trace:
    """The trace of a block that is called once more on its own input. part: the part of the model that holds it."""
    return trace(run.parts.module, partial(_again, run), part=part)


def _again(run: BlockRun) -> Any:
    args, kwargs = run.parts.hidden.put(*without_cache(*run.call), run.input.clone())  # blocks may write to it
    return run.parts.module(*args, **kwargs)


def _on_record(parts: BlockParts) -> BlockParts:
    """The block with its gates and clamps recorded, should they be needed."""
    return replace(parts, gated=True, clamped=True)


def _opened(verdict: _Unproved, written: Trace) -> BlockParts:
    """The block with the suspected units replaced by the nonlinear modules inside them."""
    parts = verdict.parts
    others = {*parts.attending, *parts.weighing}
    found = [v for u in verdict.culprits for v in nonlinear_units(u, written, others, parts.norms)]
    if not found:
        raise UnsupportedModelError(f"{parts.name}: {verdict.fault}")
    kept = [u for u in parts.units if u not in verdict.culprits]
    return with_linears(replace(parts, units=(*kept, *found)), written)


def _verdict(run: BlockRun, factors: bool) -> ProvedBlock | _Unproved:
    run.parts = replace(run.parts, gated=False, clamped=any(run.recording.clamps.values()))
    if len({call.output.shape for call in run.attention}) > 1:
        calls = f"it calls attention {len(run.attention)} times, each over another number of tokens"
        raise UnsupportedModelError(f"{run.parts.name}: {calls}")
    if any(reads(run, slot) for slot in run.parts.beside):
        raise UnsupportedModelError(
            f"{type(run.parts.module).__name__} reads a second stream beside its own (such as the embeddings): its "
            "output is no affine map of one stream"
        )
    take_handed(run)
    fault, culprits = _fault(run)
    if not culprits and any(run.recording.gates.values()) and (fault is not None or _gates_act(run)):
        run.parts, ungated, held = replace(run.parts, gated=True), run.parts, fault is None
        fault, culprits = _gate_fault(run)
        if held and fault is not None:
            run.parts, fault, culprits = ungated, None, ()
    if fault is None and run.parts.streams > 1:
        fault = _weights_fault(run)
    if fault is not None:
        if not culprits:
            raise UnsupportedModelError(f"{run.parts.name}: {fault}{blamed(run, fault)}")
        return _Unproved(run.parts, fault, culprits)
    fault = None if run.parts.cross is None else cross_fault(run)
    if fault is not None:
        raise UnsupportedModelError(f"{run.parts.name}: {fault}")
    zero, given = torch.zeros_like(run.input), zero_given(run, 1)
    at_zero = run.replay(zero, given)
    homogeneous = _is_zero(at_zero) and not run.parts.unit_biases and gives_nothing_for_zero(run)
    run.parts = _economies(run, homogeneous)
    run.parts = replace(run.parts, arrives=_arrives(run, at_zero))
    beside = _beside_notes(run)
    found = ProvedBlock(run.parts, notes=(*_early_notes(run, None), *beside))
    if not factors:
        return found
    if run.parts.cross is not None or run.parts.second is not None:
        try:
            found = replace(found, cross=find_second_factors(run))
        except DuatError as reason:
            found = replace(found, cross_reason=str(reason))
    try:
        whole = find_factors(run, Base(zero, given, at_zero))
    except DuatError as reason:
        return replace(found, factors_reason=_gate_reason(run.parts, str(reason)))
    return replace(found, factors=whole, notes=(*_early_notes(run, whole), *beside))


def _early_notes(run: BlockRun, factors: BlockFactors | None) -> tuple[str, ...]:
    """Notes on nonlinear modules in front of attention, except where W' acts on their output."""
    if not run.attention or (factors is not None and factors.own):
        return ()
    early = [u.module for u in run.units if not u.behind_attention and u.module not in run.parts.mixing]
    late = any(u.behind_attention for u in run.units)
    return tuple(
        f"{type(module).__name__}, nonlinear, stands in front of attention; its output counts among the UAT terms"
        for module in early
        if late
    )


def _beside_notes(run: BlockRun) -> tuple[str, ...]:
    """Notes on a path past attention and FFN by which the first or the last token reaches others."""
    if run.output.shape != run.input.shape or run.input.shape[1] < 2:  # it merges tokens, or there is only one
        return ()
    zero, ends = torch.zeros_like(run.input), ((0, slice(1, None)), (run.input.shape[1] - 1, slice(0, -1)))
    items, noise = zero.repeat(1 + len(ends), 1, 1), random_like(run.input)[0]
    for item, (token, _) in enumerate(ends, start=1):
        items[item, token] = noise[token]
    base, *changed = run.silent(items).end
    if _values_go_beside(run, items, torch.stack([base, *changed])):
        return ("values reach the stream beside H as well, token by token; W' leaves that path out",)
    for output, (_, others) in zip(changed, ends, strict=True):
        moved = (output - base).abs()
        if float(moved[others].max()) > 1e-4 * float(moved.max()):
            return ("a linear path beside attention mixes tokens; W' leaves it out",)
    return ()


def _values_go_beside(run: BlockRun, items: Tensor, made: Tensor) -> bool:
    """Whether values reach the output past attention: whether zeros in their place change how far the replay of these
    streams with a silent attention moves. made: the output of that replay with the values."""
    values, calls = run.parts.value_projection, run.attention
    if values is None or run.parts.mixer is not None or not calls or any(call.windows is not None for call in calls):
        return False
    with giving([values.linear], torch.zeros_like):
        other = run.silent(items).end
    moved = (made - made[:1]) - (other - other[:1])
    return float(moved.abs().max()) > 1e-4 * float((made - made[:1]).abs().max())


def _gate_reason(parts: BlockParts, reason: str) -> str:
    if parts.clamped:
        reason = f"its attention clips what it computes; {reason}"
    if parts.weighing and parts.hidden.streams == 1:
        reason = f"streams side by side may be weighed channel by channel; {reason}"
    return f"a gate inside attention scales its channels, so {reason}" if parts.gated else reason


def _gates_act(run: BlockRun) -> bool:
    """Whether squashing functions inside attention change more than H, which is held: then they are gates, though a
    coarse dtype may hide that the block is not affine without them."""
    r = random_like(run.input)
    live = run.replay(r).end
    with holding(run, parts=replace(run.parts, gated=True)):
        held = run.replay(r).end
    return relative_error(held, live) > torch.finfo(live.dtype).eps


def _gate_fault(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """As `_fault`, with gates held. A held value that is added, not multiplied, would pass for a bias and is a fault.

    On a zero stream, without the block's biases, there is nothing for a gate to scale: only an added value moves the
    output.
    """
    fault, culprits = _fault(run)
    gates = {module: [2 * value for value in values] for module, values in run.recording.gates.items()}
    if fault is None and _moves_zero(run, gates=defaultdict(list, gates)):
        return "a squashing function inside its attention adds to the stream; it gates nothing", ()
    return fault, culprits


def _weights_fault(run: BlockRun) -> str | None:
    """The fault of held weights of streams that are added, as in `_gate_fault`; None without it."""
    if _moves_zero(run, weights=[2 * value for value in run.recording.weights]):
        return "a squashing function of its own forward adds to the stream; it weighs no streams"
    return None


def _moves_zero(run: BlockRun, **doubled: Any) -> bool:
    """Whether other held values move the block's output for a zero stream, without the block's biases."""
    zero = torch.zeros_like(run.input)
    with _without_biases(run):
        once = run.replay(zero).end
        with holding(run.recording, **doubled):
            twice = run.replay(zero).end
    return not torch.equal(once, twice)


@contextlib.contextmanager
def _without_biases(run: BlockRun) -> Iterator[None]:
    """While active, replays run without the biases of the block's layers and norms."""
    norms = {
        module: [replace(one, form=replace(one.form, bias=None)) for one in held]
        for module, held in run.recording.norms.items()
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(run.recording, norms=norms))
        for module in run.parts.module.modules():
            stack.enter_context(without_bias(module))
        yield


def _fault(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """The fault of the replayed block (None: no fault), and the units that may be to blame.

    If the block has no fault when several items share a replay, they share one from here on.
    """
    plain = run.parts
    if not plain.intercepted and plain.mixer is None:
        run.parts = replace(plain, batched=True)
        with contextlib.suppress(*UNLIKE):
            if _fault_of(run)[0] is None:
                return None, ()
        run.parts = plain
    return _fault_of(run)


def _fault_of(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """As `_fault`, with `run.parts` left as they are."""
    x, r = run.input, random_like(run.input)
    zero, none = torch.zeros_like(x), zero_given(run, 1)
    noise = random_like(run.attention[0].output) if run.attention else None
    heads = None if noise is None else torch.cat([torch.zeros_like(noise), torch.zeros_like(noise), noise])
    at_0, at_r, at_noise = run.replay(torch.cat([zero, r, zero]), attention=heads).end.split(1)
    if float((at_r - at_0).abs().max()) <= 1e-6 * float(r.abs().max()):
        return "the residual stream does not pass through the replayed block", run.parts.units
    if noise is not None and float((at_noise - at_0).abs().max()) <= 1e-6 * float(noise.abs().max()):
        # items that share a replay are rounded differently: only a replay of one tells a small change from none
        apart = [run.replay(zero, attention=one).end for one in (torch.zeros_like(noise), noise)]
        openable = tuple(u for u in run.parts.units if any(u.children()) and u not in run.parts.mixing)
        if openable and torch.equal(*apart) and not projects_to_zero(run.parts):
            return "what attention adds does not pass through the replayed block", openable
    own = [u.output[None] for u in run.units]
    one, two = ([random_like(u.output, seed)[None] for u in run.units] for seed in (1, 2))
    held = [torch.cat([n, n, n, n, a, b, a + b, o]) for n, a, b, o in zip(none, one, two, own, strict=True)]
    at_0, at_x, at_r, at_sum, at_one, at_two, at_both, whole = run.replay(
        torch.cat([zero, x, r, x + r, x, r, x + r, x]), held
    ).end.split(1)
    found = [
        (relative_error(at_x + at_r - at_0, at_sum), f"{AFFINE} (relative error {{:.1e}})"),
        (relative_error(at_one + at_two - at_0, at_both), f"{AFFINE} {IN_UNITS} ({{:.1e}})"),
        (relative_error(whole, run.output), "its replay does not give its own output (relative error {:.1e})"),
    ]
    dtype = _narrowest(run)
    fault = next((_said(says, error, dtype) for error, says in found if not error <= tolerance_for(dtype)), None)
    if fault is None and run.parts.batched:
        alone = torch.cat([run.replay(r).end, run.replay(x, own).end])
        error = relative_error(torch.cat([at_r, whole]), alone)
        fault = None if error <= rounding(x.dtype) else f"items that share a replay are not as each alone ({error:.1e})"
    return fault, ()


def _narrowest(run: BlockRun) -> torch.dtype:
    """The dtype of the stream or of the block's weights, whichever rounds more: a stream may be kept in float32 between
    blocks that compute in half precision."""
    weights = {one.dtype for one in run.parts.module.parameters() if one.is_floating_point() and one.itemsize > 1}
    return max(run.input.dtype, *weights, key=lambda one: torch.finfo(one).eps)


def _said(says: str, error: float, dtype: torch.dtype) -> str:
    """The text of a fault with its error filled in. An error that is not finite says nothing of the block: the numbers
    that it is computed from are too large. In half precision the cause may be that the model's own code converts what
    is held elsewhere."""
    name, beside = str(dtype).removeprefix("torch."), ""
    if not math.isfinite(error):
        beside = f"; {OUT_OF_RANGE} {name} on the way: is a weight far too large?"
    elif dtype.itemsize < 4:
        beside = f"; that is in {name}, and --dtype float32 may show otherwise"
    return says.format(error) + beside


def _is_zero(replay: Replay) -> bool:
    """Whether the output, values and unit inputs of a replay are all exactly zero."""
    seen = [replay.output, *replay.values, *replay.unit_inputs]
    return not any(t is not None and bool(t.any()) for t in seen)


def _economies(run: BlockRun, homogeneous: bool) -> BlockParts:
    """The block's parts with the flags that make replay cheaper. Attention by its projections alone (`direct`) is kept
    only if the output stays the same."""
    plain = replace(run.parts, homogeneous=homogeneous)
    whole = plain.value_projection is not None and plain.output_projection is not None
    if plain.intercepted or plain.handed or plain.mixer is not None or plain.hidden.flat or not whole or plain.clamped:
        return plain
    items = torch.cat([run.input, random_like(run.input)])
    expected = run.replay(items).end
    run.parts = replace(plain, direct=True)
    with contextlib.suppress(*UNLIKE):
        output = run.replay(items).end
        if output.shape == expected.shape and relative_error(output, expected) <= rounding(output.dtype):
            return run.parts
    return plain


def _arrives(run: BlockRun, at_zero: Replay) -> bool:
    """Whether noise in place of the units' outputs, on a zero stream, changes the output by exactly that noise."""
    if not run.units or any(u.output.numel() != run.input.numel() for u in run.units):
        return False
    noise = [random_like(u.output, seed) for seed, u in enumerate(run.units)]
    moved = run.replay(torch.zeros_like(run.input), [n[None] for n in noise]).end - at_zero.end
    return relative_error(sum(noise).reshape(moved.shape), moved) <= rounding(moved.dtype)  # type: ignore[union-attr]

"""Proof of a block's parts on a short random input.

Three things must hold for the replayed block: the residual stream passes through it, it is affine, and at the
captured input it gives the block's own output. Then come the economies, each kept only if outputs stay the same
(several items a replay; attention without queries and keys), and the factors of W'.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import DuatError, UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, rounding, tolerance_for
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.cross import cross_fault, gives_nothing_for_zero
from duat_cli.models.discovery.parts import nonlinear_units, with_linears
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun, Rig, zero_given
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.value_path.cross import find_cross_factors
from duat_cli.models.value_path.factors import BlockFactors, find_factors
from duat_cli.models.value_path.projections import projects_to_zero


@dataclass(frozen=True)
class ProvedBlock:
    """A block whose replay is proved to be affine and its own."""

    parts: BlockParts
    factors: BlockFactors | None
    factors_reason: str | None  # why W' has no Kronecker factors
    notes: tuple[str, ...] = ()  # what the block does beside attention and FFN
    cross: BlockFactors | None = None  # of cross-attention
    cross_reason: str | None = None  # why W'_c has no Kronecker factors, where there is cross-attention


@dataclass(frozen=True)
class Verdict:
    """What the examination of one block found."""

    parts: BlockParts
    fault: str | None
    culprits: tuple[nn.Module, ...] = ()  # units that may hold the residual stream
    factors: BlockFactors | None = None
    factors_reason: str | None = None
    notes: tuple[str, ...] = ()
    cross: BlockFactors | None = None
    cross_reason: str | None = None

    def proved(self) -> ProvedBlock:
        return ProvedBlock(self.parts, self.factors, self.factors_reason, self.notes, self.cross, self.cross_reason)


class Proof:
    """One pass of the probe prompt that gives a verdict on every block.

    UnsupportedModelError for a fault that no other choice of units can mend. coming: as of `Rig`; factors: as of
    `discover`.
    """

    def __init__(
        self,
        stack: Any,
        forward: Callable[[], Any],
        on_verdict: Callable[[Verdict], None],
        *,
        interface: bool,
        coming: Iterable[nn.Module] = (),
        factors: bool = True,
    ) -> None:
        self._forward, self._on_verdict, self._factors = forward, on_verdict, factors
        self._rig = Rig(stack, [], interface=interface, coming=coming)
        self._asked: set[nn.Module] = set()

    def learn(self, parts: BlockParts) -> None:
        """Before that block runs."""
        # so that gates and clamps are on record, should they be needed
        self._rig.learn(replace(parts, gated=True, clamped=True))

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """What `run` needs around it."""
        return self._rig.active()

    def run(self) -> None:
        """The pass."""
        self._rig.run(self._forward, self._ask)

    def _ask(self, run: BlockRun) -> None:
        if run.parts.module not in self._asked:
            self._asked.add(run.parts.module)
            self._on_verdict(_verdict(run, self._factors))


def opened(verdict: Verdict, written: Trace) -> BlockParts:
    """The block with the suspected units replaced by the nonlinear modules inside them."""
    parts = verdict.parts
    found = [v for u in verdict.culprits for v in nonlinear_units(u, written, set(parts.attending), parts.norms)]
    if not found:
        raise UnsupportedModelError(f"{parts.name}: {verdict.fault}")
    kept = [u for u in parts.units if u not in verdict.culprits]
    return with_linears(replace(parts, units=(*kept, *found)), written)


def _verdict(run: BlockRun, factors: bool) -> Verdict:
    run.parts = replace(run.parts, gated=False, clamped=any(run.recording.clamps.values()))
    if len({call.output.shape for call in run.attention}) > 1:
        calls = f"it calls attention {len(run.attention)} times, each over another number of tokens"
        raise UnsupportedModelError(f"{run.parts.name}: {calls}")
    if any(run.reads(slot) for slot in run.parts.beside):
        raise UnsupportedModelError(
            f"{type(run.parts.module).__name__} reads a second stream beside its own (such as the embeddings): its "
            "output is no affine map of one stream"
        )
    fault, culprits = _fault(run)
    if fault is not None and not culprits and any(run.recording.gates.values()):
        run.parts = replace(run.parts, gated=True)
        fault, culprits = _gate_fault(run)
    if fault is not None:
        if not culprits:
            raise UnsupportedModelError(f"{run.parts.name}: {fault}")
        return Verdict(run.parts, fault, culprits)
    fault = None if run.parts.cross is None else cross_fault(run)
    if fault is not None:
        raise UnsupportedModelError(f"{run.parts.name}: {fault}")
    base = torch.zeros_like(run.input)
    given = zero_given(run, 1)
    at_zero = run.replay(base, given)
    homogeneous = _is_zero(at_zero) and not run.parts.unit_biases and gives_nothing_for_zero(run)
    run.parts = _economies(run, homogeneous)
    run.parts = replace(run.parts, arrives=_arrives(run, at_zero))
    found = Verdict(run.parts, None, notes=_notes(run, None))
    if not factors:
        return found
    if run.parts.cross is not None:
        try:
            found = replace(found, cross=find_cross_factors(run))
        except DuatError as reason:
            found = replace(found, cross_reason=str(reason))
    try:
        whole = find_factors(run, at_zero, base, given)
    except DuatError as reason:
        return replace(found, factors_reason=_gate_reason(run.parts, str(reason)))
    return replace(found, factors=whole, notes=_notes(run, whole))


def _notes(run: BlockRun, factors: BlockFactors | None) -> tuple[str, ...]:
    """Nonlinear modules in front of attention, unless W' is of what they give, and tokens that reach others past
    attention and FFN."""
    notes = []
    if run.attention and not (factors is not None and factors.own):
        early = [u.module for u in run.units if not u.behind_attention and u.module not in run.parts.mixing]
        late = any(u.behind_attention for u in run.units)
        notes = [
            f"{type(module).__name__}, nonlinear, stands in front of attention; its output counts among the UAT terms"
            for module in early
            if late
        ]
    if run.output.shape != run.input.shape or run.input.shape[1] < 2:  # it is there to mix tokens, or has one
        return tuple(notes)
    nothing, zero = zero_given(run, 1), torch.zeros_like(run.input)
    silent = torch.zeros_like(run.attention[0].output) if run.attention else None
    base = output_of(run, zero, nothing, silent)[0]
    for token, others in ((0, slice(1, None)), (zero.shape[1] - 1, slice(0, -1))):
        changed = zero.clone()
        changed[0, token] = random_like(run.input)[0, token]
        moved = (output_of(run, changed, nothing, silent)[0] - base).abs()
        if float(moved[others].max()) > 1e-4 * float(moved.max()):
            notes.append("a linear path beside attention mixes tokens; W' leaves it out")
            break
    return tuple(notes)


def _gate_reason(parts: BlockParts, reason: str) -> str:
    if parts.clamped:
        reason = f"its attention clips what it computes; {reason}"
    return f"a gate inside attention scales its channels, so {reason}" if parts.gated else reason


def _gate_fault(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """As `_fault` with gates held; a held value that is added, not multiplied, would pass for a bias."""
    fault, culprits = _fault(run)
    if fault is None:
        zero, nothing, gates = torch.zeros_like(run.input), zero_given(run, 1), run.recording.gates
        once = output_of(run, zero, nothing)
        doubled = {module: [2 * value for value in values] for module, values in gates.items()}
        run.recording.gates = defaultdict(list, doubled)
        twice = output_of(run, zero, nothing)
        run.recording.gates = gates
        if not torch.equal(once, twice):
            return "a squashing function inside its attention adds to the stream; it gates nothing", ()
    return fault, culprits


def _fault(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """What is wrong with the replayed block (None: nothing), and which units may be to blame."""
    nothing = zero_given(run, 1)
    x, r = run.input, random_like(run.input)
    zero = torch.zeros_like(x)
    tolerance = tolerance_for(x.dtype)
    silent = torch.zeros_like(run.attention[0].output) if run.attention else None
    through = output_of(run, r, nothing, silent) - output_of(run, zero, nothing, silent)
    if float(through.abs().max()) <= 1e-6 * float(r.abs().max()):
        return "the residual stream does not pass through the replayed block", run.parts.units
    if silent is not None:
        noise = random_like(run.attention[0].output)
        reached = output_of(run, zero, nothing, noise) - output_of(run, zero, nothing, silent)
        openable = tuple(u for u in run.parts.units if any(u.children()) and u not in run.parts.mixing)
        if openable and not bool(reached.any()) and not projects_to_zero(run.parts):
            return "what attention adds does not pass through the replayed block", openable
    at_0, at_x, at_r, at_sum = (output_of(run, z, nothing) for z in (zero, x, r, x + r))
    error = relative_error(at_x + at_r - at_0, at_sum)
    if not error <= tolerance:
        return f"with its dynamic parameters frozen it is not affine (relative error {error:.1e})", ()
    one, two = ([random_like(u.output, seed)[None] for u in run.units] for seed in (1, 2))
    both = output_of(run, x + r, [a + b for a, b in zip(one, two, strict=True)])
    error = relative_error(output_of(run, x, one) + output_of(run, r, two) - at_0, both)
    if not error <= tolerance:
        return f"with its dynamic parameters frozen it is not affine in what its units give ({error:.1e})", ()
    error = relative_error(output_of(run, x, [u.output[None] for u in run.units]), run.output)
    if not error <= tolerance:
        return f"its replay does not give its own output (relative error {error:.1e})", ()
    return None, ()


def output_of(run: BlockRun, z: Tensor, given: list[Tensor], attention: Tensor | None = None) -> Tensor:
    """The replayed block's output."""
    output = run.replay(z, given, attention=attention).output
    assert output is not None
    return output


def _is_zero(replay: Replay) -> bool:
    """Whether nothing at all came out of a replay of zeros, to the bit."""
    seen = [replay.output, *replay.values, *replay.unit_inputs]
    return not any(t is not None and bool(t.any()) for t in seen)


def _economies(run: BlockRun, homogeneous: bool) -> BlockParts:
    """The block's parts with what makes replay cheaper, each kept only if the output stays the same."""
    plain = replace(run.parts, homogeneous=homogeneous)
    if plain.intercepted or plain.mixer is not None or plain.hidden.flat:
        return plain
    items = torch.cat([run.input, random_like(run.input)])
    expected = output_of(run, items, zero_given(run, 2))
    kept = _kept(run, replace(plain, batched=True), plain, items, expected)
    if kept.value_projection is not None and kept.output_projection is not None and not kept.clamped:
        kept = _kept(run, replace(kept, direct=True), kept, items, expected)
    return kept


def _arrives(run: BlockRun, at_zero: Replay) -> bool:
    """Whether noise in place of the units' outputs, on a stream of zeros, moves the output by just that noise."""
    if not run.units or any(u.output.numel() != run.input.numel() for u in run.units):
        return False
    assert at_zero.output is not None
    noise = [random_like(u.output, seed) for seed, u in enumerate(run.units)]
    moved = output_of(run, torch.zeros_like(run.input), [n[None] for n in noise]) - at_zero.output
    return relative_error(sum(noise).reshape(moved.shape), moved) <= rounding(moved.dtype)  # type: ignore[union-attr]


def _kept(run: BlockRun, tried: BlockParts, otherwise: BlockParts, items: Tensor, expected: Tensor) -> BlockParts:
    """`tried` if the block's output stays the same with it."""
    run.parts = tried
    run.parts = tried if _gives(run, items, expected) else otherwise
    return run.parts


def _gives(run: BlockRun, items: Tensor, expected: Tensor) -> bool:
    try:
        output = output_of(run, items, zero_given(run, 2))
    except (RuntimeError, ValueError, TypeError, LookupError):
        return False
    return output.shape == expected.shape and relative_error(output, expected) <= rounding(output.dtype)

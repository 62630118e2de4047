"""Proof of a block's parts on a short random input, all blocks in one run.

Three things must hold for the replayed block: the residual stream passes through it, it is affine, and at the
captured input it gives the block's own output. Then come the economies, each kept only if outputs stay the same
(several items a replay; query and key projections left idle), and the factors of W'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, resolution, same_storage
from duat_cli.models.factors import BlockFactors, find_factors
from duat_cli.models.parts import BlockParts
from duat_cli.models.rig import BlockRun, Rig, zero_given
from duat_cli.models.tracing import Trace


@dataclass(frozen=True)
class ProvedBlock:
    """A block whose replay is proved to be affine and its own."""

    parts: BlockParts
    factors: BlockFactors | None
    factors_reason: str | None  # why W' has no Kronecker factors


@dataclass(frozen=True)
class Verdict:
    """What the examination of one block found."""

    parts: BlockParts
    fault: str | None
    culprits: tuple[nn.Module, ...] = ()  # units that may hold the residual stream
    factors: BlockFactors | None = None
    factors_reason: str | None = None

    def proved(self) -> ProvedBlock:
        return ProvedBlock(self.parts, self.factors, self.factors_reason)


def examine(
    stack: Any, blocks: Sequence[BlockParts], forward: Callable[[], Any], written: Trace
) -> list[Verdict]:
    """One verdict a block; raises UnsupportedModelError for a fault that no other choice of units can mend."""
    candidates = [replace(b, batched=False, idle=_idle_candidates(b, written)) for b in blocks]
    verdicts: dict[nn.Module, Verdict] = {}

    def ask(run: BlockRun) -> None:
        if run.parts.module not in verdicts:
            verdicts[run.parts.module] = _verdict(run)

    intercepted = any(b.intercepted for b in blocks)
    with Rig(stack, candidates, interface=not intercepted).active() as rig:
        rig.run(forward, ask)
    return [verdicts[b.module] for b in blocks]


def _verdict(run: BlockRun) -> Verdict:
    plain = replace(run.parts, idle={})
    economical, run.parts = run.parts, plain
    fault, culprits = _fault(run)
    if fault is not None:
        if not culprits:
            raise UnsupportedModelError(f"{plain.name}: {fault}")
        return Verdict(plain, fault, culprits)
    run.parts = _economies(run, economical)
    base = torch.zeros_like(run.input)
    given = zero_given(run, 1)
    try:
        factors = find_factors(run, run.replay(base, given), base, given)
    except UnsupportedModelError as reason:
        return Verdict(run.parts, None, factors_reason=str(reason))
    return Verdict(run.parts, None, factors=factors)


def _fault(run: BlockRun) -> tuple[str | None, tuple[nn.Module, ...]]:
    """What is wrong with the replayed block (None: nothing), and which units may be to blame."""
    nothing = zero_given(run, 1)
    x, r = run.input, random_like(run.input)
    zero = torch.zeros_like(x)
    tolerance = 1000 * resolution(x.dtype)
    silent = torch.zeros_like(run.attention[0].output) if run.attention else None
    through = output_of(run, r, nothing, silent) - output_of(run, zero, nothing, silent)
    if float(through.abs().max()) <= 1e-6 * float(r.abs().max()):
        return "the residual stream does not pass through the replayed block", run.parts.units
    at_0, at_x, at_r, at_sum = (output_of(run, z, nothing) for z in (zero, x, r, x + r))
    error = relative_error(at_x + at_r - at_0, at_sum)
    if not error <= tolerance:
        return f"with its dynamic parameters frozen it is not affine (relative error {error:.1e})", ()
    error = relative_error(output_of(run, x, [u.output[None] for u in run.units]), run.output)
    if not error <= tolerance:
        return f"its replay does not give its own output (relative error {error:.1e})", ()
    return None, ()


def output_of(run: BlockRun, z: Tensor, given: list[Tensor], attention: Tensor | None = None) -> Tensor:
    """The replayed block's output."""
    output = run.replay(z, given, attention=attention).output
    assert output is not None
    return output


def _economies(run: BlockRun, economical: BlockParts) -> BlockParts:
    """The block's parts with what makes replay cheaper and leaves its output the same."""
    r, nothing = random_like(run.input), zero_given(run, 1)
    plain = run.parts
    if economical.idle:
        expected = output_of(run, r, nothing)
        run.parts = replace(plain, idle=economical.idle)
        if not _same(lambda: output_of(run, r, nothing), expected, exact=True):
            run.parts = plain
    if not plain.intercepted:
        alone = run.parts
        items = torch.cat([run.input, r])
        expected = output_of(run, items, zero_given(run, 2))
        run.parts = replace(alone, batched=True)
        if not _same(lambda: output_of(run, items, zero_given(run, 2)), expected, exact=False):
            run.parts = alone
    return run.parts


def _same(got: Callable[[], Tensor], expected: Tensor, *, exact: bool) -> bool:
    try:
        value = got()
    except (RuntimeError, ValueError, TypeError, LookupError):
        return False
    if exact:
        return torch.equal(value, expected)
    return value.shape == expected.shape and relative_error(value, expected) <= 100 * resolution(value.dtype)


def _idle_candidates(parts: BlockParts, written: Trace) -> dict[nn.Module, int]:
    """Linear layers inside attention whose output is neither the values nor made of H V: queries and keys."""
    calls = [c for c in written.attention if c.module in parts.attention]
    idle: dict[nn.Module, int] = {}
    for attention in parts.attention:
        for module in attention.modules():
            events = written.calls(module)
            if not events or any(module.children()) or not hasattr(module, "weight") or module in parts.norms:
                continue
            result, tensors = events[0].result, events[0].tensors
            if result is None or result.ndim != 3 or not tensors or not isinstance(module.weight, Tensor):
                continue
            if not any(same_storage(result, c.value) or same_storage(tensors[0], c.output) for c in calls):
                idle[module] = result.shape[-1]
    return idle

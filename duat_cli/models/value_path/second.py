"""The factors of a block's second operator W'_c where a token mixer without softmax runs beside its attention.

    W'_c = Σ_h Ĥ_h (g_h ∘ ·) ⊗ O_hᵀ,   H_h of the mixer's own kernel, g the factors of its channels, O its output layer

so that W'_c u is what the mixer adds to the stream, u (N, channels) being its own values, a UAT term, constants aside.
The block's own replay has to give the same, which is the proof.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from duat_cli.models.arrays import gaussian, wide
from duat_cli.models.instrument.attention import ScaledRows
from duat_cli.models.instrument.mixer import MixerCall
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.beside import Beside, reached
from duat_cli.models.value_path.factors import BlockFactors, choice_of_channels, read_output
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.models.value_path.probed import SEED, accept, missed
from duat_cli.operators.kronecker import HeadFactors


def find_second_factors(run: BlockRun) -> BlockFactors:
    """O and the tap of the mixer; UnsupportedModelError says why W'_c is no sum of Kronecker products."""
    assert run.parts.second is not None
    attention = run.second.attention()
    tap = _beside(run).tap("what the mixer beside its attention adds")
    output = read_output(run, run.parts.second.output_projection, attention, tap)
    heads = HeadFactors(choice_of_channels(attention.value), output)
    found = BlockFactors(heads, tap, None, 0.0, "read", gated=True, own=True)
    found = found.fitted(*_reach(run, found))
    second_operator(run, found)
    return found


def second_operator(run: BlockRun, known: BlockFactors) -> AttentionOperator:
    """W'_c of this block for this input, compared with what the block's own mixer adds."""
    attention, gate = run.second.attention(), _gate(run.second)
    token_scale, error = (known.token_scale, known.error) if known.token_scale is not None else _reach(run, known)
    rows = attention.rows
    whole = torch.equal(gate, gate[..., :1].expand_as(gate))  # a head as a whole: part of its H
    operator = AttentionOperator(
        rows=ScaledRows(rows, gate[..., 0]) if whole else rows,
        source_scale=torch.ones_like(gate[..., 0]),
        token_scale=token_scale,
        values=wide(attention.value[0]),
        factors=known.heads,
        error=error,
        allowed=attention.allowed,
        own=True,
        gate=None if whole else gate,
    )
    error = max(error, missed(operator.image(), *_moved(run, known, _beside(run).output)))
    accept(error, run.input.dtype)
    return replace(operator, error=error)


def _reach(run: BlockRun, known: BlockFactors) -> tuple[Tensor, float]:
    """t for this input: a known vector R in place of the kernel's result, and what arrives of it: t_i (g ∘ R) O."""
    call = run.second
    added = gaussian(tuple(call.result.shape), call.result, SEED)
    target, _ = _moved(run, known, _given(call, added))
    return reached(known, wide(call.by_head(added * call.gate)[0]), target)


def _moved(run: BlockRun, known: BlockFactors, output: Tensor) -> tuple[Tensor, float]:
    """What the mixer's output moves at the tap, (N, M), over one of a kernel that gives nothing, and what may be
    rounding of it."""
    call = run.second
    return _beside(run).moved(known.tap, output, _given(call, torch.zeros_like(call.result)))


def _given(call: MixerCall, result: Tensor) -> Tensor:
    """The mixer's output where its kernel gives `result`, (1, N, channels)."""
    output = call.returning(call.by_head(result))
    return output if isinstance(output, Tensor) else output[0]


def _gate(call: MixerCall) -> Tensor:
    """(heads, N, d)."""
    return wide(call.by_head(call.gate)[0]).transpose(0, 1).contiguous()


def _beside(run: BlockRun) -> Beside:
    assert run.parts.second is not None
    return Beside(run, next(k for k, unit in enumerate(run.units) if unit.module is run.parts.second.form.module))
